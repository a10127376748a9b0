"""Synthetic recordings of rotating machines: each of eight faults has its own harmonics, speed and phase vary."""
import math

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

NUM_CLASSES, LENGTH = 8, 64


def make_recordings(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (n,), generator=g)
    signature = torch.rand(NUM_CLASSES, 4, generator=torch.Generator().manual_seed(2024))  # the same for every split
    speed = 2.0 + 0.6 * torch.rand(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    time = torch.linspace(0, 1, LENGTH).unsqueeze(0)
    signal = torch.zeros(n, LENGTH)
    for harmonic in range(4):
        strength = (signature[labels, harmonic] > 0.45).float() + 0.3 * signature[labels, harmonic]
        signal += strength.unsqueeze(1) * torch.sin((harmonic + 1) * (2 * math.pi * speed * time + phase))
    signal += 0.2 * torch.randn(n, LENGTH, generator=g)
    return TensorDataset(signal.unsqueeze(1), labels)


class MachineData(L.LightningDataModule):
    """Shards both splits by itself (the trainer is told not to): validation must count every recording once."""

    def __init__(self, batch_size=64, train_size=2048, val_size=502, seed=0):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.train_set = make_recordings(self.hparams.train_size, seed=self.hparams.seed + 1)
        self.val_set = make_recordings(self.hparams.val_size, seed=self.hparams.seed + 2)

    def train_dataloader(self):
        # the trainer calls set_epoch on this sampler
        sampler = DistributedSampler(self.train_set, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank,
                                     shuffle=True, seed=self.hparams.seed, drop_last=True)
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self):
        share = range(self.trainer.global_rank, len(self.val_set), self.trainer.world_size)
        return DataLoader(Subset(self.val_set, share), batch_size=self.hparams.batch_size)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.trainer.training:
            return batch
        signal, labels = batch
        # depends on the step and on the rank only, so that a resumed run draws the same views
        step = self.trainer.global_step * self.trainer.world_size + self.trainer.global_rank
        generator = torch.Generator(signal.device).manual_seed(1_000_003 * self.hparams.seed + step)
        return augment(signal, generator), augment(signal, generator), labels


def augment(signal, generator):
    """Random roll in time, gain, noise, and a blanked stretch."""
    n, _, length = signal.shape
    device = signal.device
    position = torch.arange(length, device=device)
    roll = torch.randint(length // 4, (n, 1), generator=generator, device=device)
    view = signal.gather(2, ((position + roll) % length).unsqueeze(1))
    gain = 0.7 + 0.6 * torch.rand(n, 1, 1, generator=generator, device=device)
    noise = 0.2 * torch.randn(view.shape, generator=generator, device=device)
    start = torch.randint(length, (n, 1), generator=generator, device=device)
    kept = (position < start) | (position >= start + length // 8)
    return (gain * view + noise) * kept.unsqueeze(1)
