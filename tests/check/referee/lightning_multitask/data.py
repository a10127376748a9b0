"""Handwritten digits, each turned by an unknown angle: which digit is it, and by how much was it turned?"""
import math

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

MAX_ANGLE = 40.0  # degrees


def turn(images, degrees):
    """Turn images (N, 1, H, W) about their middle."""
    angle = degrees * math.pi / 180
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    theta = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


class TurnedDigits(L.LightningDataModule):
    """Reads scikit-learn's digits. The samplers are made here, so the Trainer must not add its own
    (use_distributed_sampler=False): validation images are dealt out without the padding of DistributedSampler."""

    def __init__(self, batch_size=50, n_train=1400, seed=0, num_workers=0):
        super().__init__()
        self.batch_size, self.n_train, self.seed, self.num_workers = batch_size, n_train, seed, num_workers
        self.train_set = self.val_set = None

    def setup(self, stage):
        if self.train_set is not None:
            return
        images, digits = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        digits = torch.tensor(digits)
        g = torch.Generator().manual_seed(self.seed)  # the same angles and the same split on every rank
        degrees = (2 * torch.rand(len(images), generator=g) - 1) * MAX_ANGLE
        order = torch.randperm(len(images), generator=g)
        train, val = order[:self.n_train], order[self.n_train:]
        images = turn(images, degrees)
        images = (images - images[train].mean()) / images[train].std()
        target = degrees / MAX_ANGLE
        self.train_set = TensorDataset(images[train], digits[train], target[train])
        self.val_set = TensorDataset(images[val], digits[val], target[val])

    def train_dataloader(self):
        sampler = DistributedSampler(self.train_set, num_replicas=self.trainer.world_size,
                                     rank=self.trainer.global_rank, shuffle=True, seed=self.seed, drop_last=True)
        # A generator of its own: the loader draws a seed for its workers whenever an epoch begins, and in a resumed
        # run Lightning begins the first epoch earlier. From the global generator, that would shift the dropout masks.
        return DataLoader(self.train_set, batch_size=self.batch_size, sampler=sampler, drop_last=True,
                          num_workers=self.num_workers, generator=torch.Generator().manual_seed(self.seed))

    def val_dataloader(self):
        mine = Subset(self.val_set, range(self.trainer.global_rank, len(self.val_set), self.trainer.world_size))
        return DataLoader(mine, batch_size=4 * self.batch_size, num_workers=self.num_workers)
