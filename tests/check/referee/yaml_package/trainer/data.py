import math

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split


def make_signals(samples, length, classes, noise, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=g)
    phase = 2 * math.pi * torch.rand(samples, 1, generator=g)
    signals = torch.sin(2 * math.pi * (labels[:, None] + 1) * torch.arange(length) / length + phase)
    return TensorDataset((signals + noise * torch.randn(samples, length, generator=g))[:, None], labels)


def build_loaders(cfg, seed, rank, world_size):
    dataset = make_signals(cfg["samples"], cfg["length"], cfg["classes"], cfg["noise"], seed)
    n_val = int(cfg["val_fraction"] * len(dataset))
    split_rng = torch.Generator().manual_seed(seed)
    train_set, val_set = random_split(dataset, [len(dataset) - n_val, n_val], generator=split_rng)
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=cfg["batch_size"], sampler=sampler)
    val_shard = Subset(val_set, range(rank, len(val_set), world_size))
    return train_loader, DataLoader(val_shard, batch_size=64)
