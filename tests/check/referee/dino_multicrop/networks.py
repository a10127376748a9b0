"""Backbone, projection head and the wrapper that sends crops of several sizes through both."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def conv_block(channels, out_channels, stride):
    return nn.Sequential(nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False),
                         nn.GroupNorm(4, out_channels), nn.GELU())


class Backbone(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.Sequential(
            conv_block(1, width, 2), conv_block(width, 2 * width, 2), conv_block(2 * width, 4 * width, 1))
        self.embed_dim = 4 * 4 * width
        self.norm = nn.LayerNorm(self.embed_dim)

    def forward(self, x):
        return self.norm(F.adaptive_avg_pool2d(self.blocks(x), 2).flatten(1))


class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim, hidden_dim=128, bottleneck_dim=32):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, bottleneck_dim))
        self.last_layer = nn.Linear(bottleneck_dim, out_dim, bias=False)

    def forward(self, x):
        x = F.normalize(self.mlp(x), dim=-1)
        return F.linear(x, F.normalize(self.last_layer.weight, dim=-1))


class MultiCropWrapper(nn.Module):
    """One pass of the backbone for each size of crop, then one pass of the head for all of them."""

    def __init__(self, width, out_dim):
        super().__init__()
        self.backbone = Backbone(width)
        self.head = DINOHead(self.backbone.embed_dim, out_dim)

    def forward(self, crops):
        sizes = torch.tensor([crop.shape[-1] for crop in crops])
        counts = torch.unique_consecutive(sizes, return_counts=True)[1].tolist()
        features, start = [], 0
        for count in counts:
            features.append(self.backbone(torch.cat(crops[start:start + count])))
            start += count
        return self.head(torch.cat(features))


def param_groups(model):
    """Biases and the scales of norms are spared the weight decay."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    spared = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
