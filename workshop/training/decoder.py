"""A small transformer for text, written out in plain PyTorch. The exercises of stage 06 distribute it."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    """The sizes of a model. The default has 220,000 parameters."""

    layers: int = 4
    width: int = 64  # numbers per token between the layers
    heads: int = 4
    length: int = 64  # the most tokens of a sequence
    vocabulary: int = 256  # one token per byte of text
    tied: bool = True  # the output layer uses the matrix of the embedding


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_size = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x):
        query, key, value = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = self.attend(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def split(self, x):  # batch x length x width -> batch x heads x length x head size
        return x.unflatten(2, (-1, self.head_size)).transpose(1, 2)

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens, positions=None):
        """Return the logits (batch x length x vocabulary) for the tokens (batch x length). Positions start at 0."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
