import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.checkpointing = False

    def block(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(b, t, c)))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def forward(self, x):
        # inside the block, so that the parameters that FSDP gathered for it serve the second forward pass as well
        if self.checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(self.block, x, use_reentrant=False)
        return self.block(x)


class Transformer(nn.Module):
    def __init__(self, words, width=32, heads=4, layers=3, longest=64, dropout=0.05):
        super().__init__()
        self.word, self.place = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, words):
        x = self.word(words) + self.place(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def freeze_lower(self, layers):
        """Embeddings and the lowest blocks keep their pretrained weights. The other blocks save memory instead."""
        for module in [self.word, self.place, *self.blocks[:layers]]:
            module.requires_grad_(False)
        for block in self.blocks[layers:]:
            block.checkpointing = True
