import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def synthetic_windows(windows, channels, length, classes, seed):
    """Windows of an accelerometer: each activity swings with its own frequency, with noise on top."""
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (windows,), generator=gen)
    time = torch.arange(length) / length + torch.rand(windows, channels, 1, generator=gen)
    waves = torch.sin(2 * torch.pi * (labels.view(-1, 1, 1) + 1) * time)
    return TensorDataset(waves + torch.randn(windows, channels, length, generator=gen), labels)


def make_loaders(shape, batch_size, seed):
    data = synthetic_windows(**shape, seed=seed)
    n_val = len(data) // 6
    train_set = Subset(data, range(n_val, len(data)))
    val_set = Subset(data, range(dist.get_rank(), n_val, dist.get_world_size()))
    sampler = DistributedSampler(train_set, shuffle=True, seed=seed, drop_last=True)
    return DataLoader(train_set, batch_size, sampler=sampler, drop_last=True), DataLoader(val_set, batch_size)
