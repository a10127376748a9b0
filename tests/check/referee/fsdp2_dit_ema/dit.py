"""A small diffusion transformer (DiT) for 8x8 grey images with adaLN-Zero conditioning on time and class."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimeEmbedding(nn.Module):
    """Sinusoids of t in [0, 1], followed by a small MLP."""

    def __init__(self, dim, n_freqs=32):
        super().__init__()
        self.register_buffer("freqs", torch.exp(torch.linspace(0, math.log(1000.0), n_freqs)), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2 * n_freqs, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        angles = t[:, None] * self.freqs
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        nn.init.zeros_(self.ada[1].weight)
        nn.init.zeros_(self.ada[1].bias)

    def attention(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))

    def forward(self, x, cond):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(cond).chunk(6, dim=-1)
        x = x + gate1.unsqueeze(1) * self.attention(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    def __init__(self, size=8, patch=2, dim=64, depth=2, heads=4, n_classes=10):
        super().__init__()
        self.size, self.patch = size, patch
        tokens = (size // patch) ** 2
        self.embed = nn.Linear(patch * patch, dim)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, dim))
        self.time = TimeEmbedding(dim)
        self.label = nn.Embedding(n_classes, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.head = nn.Linear(dim, patch * patch)
        for layer in (self.ada[1], self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, images, t, labels, keep_label=None):
        """Velocity field at time t. keep_label: 0 where the class is hidden (for classifier-free guidance)."""
        x = F.pixel_unshuffle(images, self.patch).flatten(2).transpose(1, 2)
        x = self.embed(x) + self.position
        label = self.label(labels)
        if keep_label is not None:
            label = label * keep_label[:, None]
        cond = self.time(t) + label
        for block in self.blocks:
            x = block(x, cond)
        shift, scale = self.ada(cond).chunk(2, dim=-1)
        x = self.head(modulate(self.norm(x), shift, scale))
        side = self.size // self.patch
        return F.pixel_shuffle(x.transpose(1, 2).unflatten(2, (side, side)), self.patch)
