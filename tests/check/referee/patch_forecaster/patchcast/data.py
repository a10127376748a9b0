"""A synthetic load curve, its chronological split, and windows over it."""
import math
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset


def make_series(length, channels, seed):
    """(length, channels): daily and weekly rhythms, a slow common drift, and a lagged coupling between channels."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length, dtype=torch.float64)
    drift = torch.cumsum(0.02 * torch.randn(length, generator=g, dtype=torch.float64), 0)
    columns = []
    for c in range(channels):
        phase = 2 * math.pi * torch.rand(2, generator=g, dtype=torch.float64)
        day = torch.sin(2 * math.pi * t / 24 + phase[0]) + 0.4 * torch.sin(4 * math.pi * t / 24 + phase[1])
        week = 1 + 0.5 * torch.sin(2 * math.pi * t / 168 + phase[1])
        noise = 0.15 * torch.randn(length, generator=g, dtype=torch.float64)
        x = day * week + drift + noise
        if columns:
            x = x + 0.3 * torch.roll(columns[-1], 3)
        columns.append(x)
    scale = 10.0 ** torch.arange(channels, dtype=torch.float64).remainder(3)
    return (torch.stack(columns, 1) * scale + 5 * scale).float()


@dataclass
class Scaler:
    """Mean and standard deviation of every channel."""
    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    def fit(cls, values):
        values = values.double()
        return cls(values.mean(0).float(), values.std(0).clamp(min=1e-6).float())

    def normalise(self, values):
        return (values - self.mean) / self.std


class Windows(Dataset):
    """All windows whose target lies in [start, end). Their context may begin before start."""

    def __init__(self, series, start, end, context, horizon):
        self.series = series
        self.context, self.horizon = context, horizon
        self.first = max(start - context, 0)
        self.count = max(0, end - horizon - context - self.first + 1)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        begin = self.first + index
        middle = begin + self.context
        return self.series[begin:middle], self.series[middle:middle + self.horizon]


def make_datasets(cfg):
    """Training, validation and test windows in normalised units, and the scaler fitted to the training part alone."""
    series = make_series(cfg.length, cfg.channels, cfg.seed)
    train_end = int(cfg.length * cfg.train_part)
    val_end = train_end + int(cfg.length * cfg.val_part)
    scaler = Scaler.fit(series[:train_end])
    series = scaler.normalise(series)
    bounds = [(0, train_end), (train_end, val_end), (val_end, cfg.length)]
    return [Windows(series, start, end, cfg.context, cfg.horizon) for start, end in bounds], scaler


def block(dataset, rank, world_size):
    """The indices of this rank's contiguous block; the blocks differ in size by one at most and leave nothing out."""
    return range(len(dataset) * rank // world_size, len(dataset) * (rank + 1) // world_size)
