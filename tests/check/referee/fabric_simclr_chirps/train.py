"""SimCLR on short synthetic sounds with Lightning Fabric: two augmented views, NT-Xent loss over the views of all processes, nearest-neighbour check.

    torchrun --nproc-per-node=2 train.py

Goes on from run/last.pt if it exists.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset, Sampler

LENGTH, KINDS = 128, 6


def make_sounds(count, seed):
    """Six kinds of sounds (frequency and direction of the sweep) with random phase, loudness and noise."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.arange(count) % KINDS
    t = torch.linspace(0, 1, LENGTH)
    base = 6.0 + 5 * (kind // 2)[:, None] + 1.5 * torch.rand(count, 1, generator=g)
    sweep = (2.0 * (kind % 2)[:, None] - 1) * 3
    phase = 6.28 * torch.rand(count, 1, generator=g)
    wave = torch.sin(6.28 * (base * t + sweep * t ** 2) + phase)
    return wave * (0.6 + 0.8 * torch.rand(count, 1, generator=g)) + 0.7 * torch.randn(count, LENGTH, generator=g), kind


class TwoViews(Dataset):
    """Two views of a sound; the random numbers depend on epoch and index alone."""

    def __init__(self, sounds):
        self.sounds, self.epoch = sounds, 0

    def __len__(self):
        return len(self.sounds)

    def view(self, x, g):
        x = x.roll(int(torch.randint(LENGTH, (1,), generator=g)))
        x = x * (0.7 + 0.6 * torch.rand(1, generator=g)) + 0.2 * torch.randn(LENGTH, generator=g)
        start = int(torch.randint(LENGTH - 24, (1,), generator=g))
        x[start:start + 24] = 0
        return x

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * len(self) + i)
        return self.view(self.sounds[i], g), self.view(self.sounds[i], g)


class EpochSampler(Sampler):
    """The part of one rank of a permutation that depends on the epoch alone (Fabric's own sampler counts epochs from each start)."""

    def __init__(self, length, rank, world):
        self.length, self.rank, self.world, self.epoch = length, rank, world, 0

    def __len__(self):
        return self.length // self.world

    def __iter__(self):
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(17 + self.epoch))
        return iter(order[self.rank:len(self) * self.world:self.world].tolist())


class Encoder(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, width, 9, 2, 4), nn.GroupNorm(4, width), nn.GELU(),
            nn.Conv1d(width, 2 * width, 9, 2, 4), nn.GroupNorm(4, 2 * width), nn.GELU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(2 * width, 48), nn.GELU(), nn.Linear(48, 24))

    def forward(self, x):
        return self.head(self.body(x[:, None]))


def gather(fabric, z):
    """The vectors of all ranks; the own ones keep their gradient, which reaches the other ranks' vectors on their side."""
    if fabric.world_size == 1:
        return z
    parts = list(fabric.all_gather(z.detach()).unbind(0))
    parts[fabric.global_rank] = z
    return torch.cat(parts)


def nt_xent(fabric, a, b, temperature):
    """Loss of the whole global batch, the same number on every rank."""
    a, b = (gather(fabric, F.normalize(v.float(), dim=1)) for v in (a, b))
    z = torch.cat([a, b])
    logits = z @ z.t() / temperature
    logits = logits.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -torch.inf)
    target = torch.arange(len(z), device=z.device).roll(len(a))
    return F.cross_entropy(logits, target)


@torch.no_grad()
def neighbour_accuracy(fabric, net, bank, bank_kind, query, query_kind):
    """1-nearest-neighbour accuracy on the features before the head; every rank has its part of the queries."""
    net.eval()
    part = slice(fabric.global_rank, None, fabric.world_size)
    dtype = next(net.parameters()).dtype
    known = F.normalize(net.body(bank[:, None].to(dtype)).float(), dim=1)
    asked = F.normalize(net.body(query[part][:, None].to(dtype)).float(), dim=1)
    right = (bank_kind[(asked @ known.t()).argmax(1)] == query_kind[part]).sum()
    net.train()
    return fabric.all_reduce(right, reduce_op="sum").item() / len(query)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=60, help="sounds per step over all processes")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    fabric = Fabric(accelerator="auto", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp", precision=args.precision)
    fabric.launch()
    fabric.seed_everything(2, verbose=False)

    sounds, _ = make_sounds(480, seed=30)
    bank, bank_kind, query, query_kind = (fabric.to_device(t) for t in (*make_sounds(180, seed=31), *make_sounds(131, seed=32)))
    views = TwoViews(sounds)
    sampler = EpochSampler(len(views), fabric.global_rank, fabric.world_size)
    loader = DataLoader(views, batch_size=args.batch // fabric.world_size, sampler=sampler, drop_last=True)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)

    net = Encoder()
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=1e-2)
    model, optimizer = fabric.setup(net, optimizer)

    state = {"model": model, "optimizer": optimizer, "epoch": -1}
    path = os.path.join(args.out, "last.pt")
    if os.path.exists(path):
        fabric.load(path, state)

    for epoch in range(state["epoch"] + 1, args.epochs):
        views.epoch = sampler.epoch = epoch
        total = torch.zeros((), device=fabric.device)
        for first, second in loader:
            a, b = model(torch.cat([first, second])).chunk(2)
            loss = nt_xent(fabric, a, b, args.temperature)
            optimizer.zero_grad()
            # each rank holds the part of the gradient that flows through its own vectors; DDP takes the mean, the sum is wanted
            fabric.backward(loss * fabric.world_size)
            optimizer.step()
            total += loss.detach() / len(loader)
        accuracy = neighbour_accuracy(fabric, net, bank, bank_kind, query, query_kind)
        mean = fabric.all_reduce(total, reduce_op="mean").item()
        fabric.print(f"epoch {epoch}: loss {mean:.4f}  steps {len(loader)}  neighbour accuracy {accuracy:.4f}", flush=True)
        state["epoch"] = epoch
        fabric.save(path + ".tmp", state)
        if fabric.is_global_zero:
            os.replace(path + ".tmp", path)
        fabric.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
