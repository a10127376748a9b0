"""PatchTST in small: each channel is a series of its own, cut into overlapping patches that a transformer reads."""
import torch
import torch.nn as nn


class InstanceNorm(nn.Module):
    """Takes each window's level and spread away and gives them back to the forecast (RevIN)."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        std = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        return (x - mean) / std * self.weight + self.bias, (mean, std)

    def inverse(self, y, statistics):
        mean, std = statistics
        return (y - self.bias) / (self.weight + 1e-8) * std + mean


class PatchForecaster(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.patch, self.stride = cfg.patch, cfg.stride
        patches = (cfg.context - cfg.patch) // cfg.stride + 1
        self.norm = InstanceNorm(cfg.channels)
        self.embed = nn.Linear(cfg.patch, cfg.dim)
        self.places = nn.Parameter(0.02 * torch.randn(patches, cfg.dim))
        self.dropout = nn.Dropout(cfg.dropout)
        layer = nn.TransformerEncoderLayer(cfg.dim, cfg.heads, 2 * cfg.dim, cfg.dropout, activation="gelu",
                                           batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, cfg.layers, norm=nn.LayerNorm(cfg.dim), enable_nested_tensor=False)
        self.head = nn.Linear(patches * cfg.dim, cfg.horizon)

    def forward(self, x):  # (batch, context, channels)
        x, statistics = self.norm(x)
        batch, _, channels = x.shape
        x = x.transpose(1, 2).reshape(batch * channels, -1)
        x = x.unfold(-1, self.patch, self.stride)
        x = self.encoder(self.dropout(self.embed(x) + self.places))
        y = self.head(x.flatten(1)).view(batch, channels, -1).transpose(1, 2)
        return self.norm.inverse(y, statistics)
