import torch.nn as nn


def activity_net(channels, classes, width):
    return nn.Sequential(
        nn.Conv1d(channels, width, kernel_size=4, stride=4), nn.GroupNorm(4, width), nn.GELU(),
        nn.Conv1d(width, width, kernel_size=5, padding=2), nn.GroupNorm(4, width), nn.GELU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, classes))
