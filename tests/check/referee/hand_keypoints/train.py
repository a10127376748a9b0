"""Keypoints of hands in small pictures: a convolutional net with soft-argmax, DistributedDataParallel, gradient accumulation.

    torchrun --nproc-per-node=2 train.py --out run

Start it again with the same arguments to go on from the last finished epoch.
"""
import argparse
import contextlib
import math
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

SIZE, POINTS = 24, 5


class HandDataset(Dataset):
    """A palm with four fingers; the targets are the palm's centre and the finger tips, in [0, 1]."""

    def __init__(self, n, seed, augment=False):
        rng = np.random.default_rng(seed)
        grid = np.arange(SIZE)
        self.images, self.points = np.zeros((n, 1, SIZE, SIZE), np.float32), np.zeros((n, POINTS, 2), np.float32)
        for i in range(n):
            centre, turn = rng.uniform(9, 15, 2), rng.uniform(-0.5, 0.5)
            self.points[i, 0] = centre
            for f in range(POINTS - 1):
                angle = turn + (f - 1.5) * 0.55
                tip = centre + rng.uniform(4, 6) * np.array([math.sin(angle), -math.cos(angle)])
                self.points[i, f + 1] = tip
                for t in np.linspace(0.2, 1, 6):
                    x, y = centre + t * (tip - centre)
                    self.images[i, 0] += np.exp(-((grid[None] - x) ** 2 + (grid[:, None] - y) ** 2) / 1.2)
            self.images[i, 0] += 1.5 * np.exp(-((grid[None] - centre[0]) ** 2 + (grid[:, None] - centre[1]) ** 2) / 8)
        self.images += rng.normal(0, 0.15, self.images.shape).astype(np.float32)
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, points = self.images[i], self.points[i]
        if self.augment:
            dx, dy = np.random.randint(-2, 3, size=2)
            image = np.roll(image, (dy, dx), axis=(1, 2)) * np.random.uniform(0.8, 1.2)
            image = image + np.random.normal(0, 0.1, image.shape)
            points = points + np.array([dx, dy])
        return torch.as_tensor(image, dtype=torch.float32), torch.as_tensor(points / (SIZE - 1), dtype=torch.float32)


class KeypointNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=2, dilation=2), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=4, dilation=4), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Dropout2d(0.05))
        self.head = nn.Conv2d(width, POINTS, 1, bias=False)
        self.register_buffer("grid", torch.linspace(0, 1, SIZE))

    def forward(self, x):
        heat = self.head(self.body(x)).flatten(2).mul(4).softmax(-1).unflatten(2, (SIZE, SIZE))
        return torch.stack([(heat.sum(2) * self.grid).sum(-1), (heat.sum(3) * self.grid).sum(-1)], dim=-1)


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def lr_factor(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


@torch.no_grad()
def validate(model, loader, device):
    """Part of the keypoints (PCK) that lie within 1.5 pixels of the truth, and the mean distance in pixels."""
    model.eval()
    sums = torch.zeros(3, device=device)
    for images, points in loader:
        error = (model(images.to(device)) - points.to(device)).mul(SIZE - 1).norm(dim=-1)
        sums += torch.stack([(error < 1.5).sum(), error.sum(), torch.tensor(error.numel(), device=device)])
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=48, help="pictures per forward pass over all processes")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    seed_everything(args.seed)

    train_set, val_set = HandDataset(960, seed=10, augment=True), HandDataset(250, seed=11)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler, num_workers=args.workers,
                        pin_memory=use_cuda, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=64)

    model = KeypointNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    total_steps = args.epochs * (len(loader) // args.accumulate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: lr_factor(s, args.warmup, total_steps))

    os.makedirs(args.out, exist_ok=True)
    last, start_epoch, best = os.path.join(args.out, "last.pt"), 0, 0.0
    checkpoint = torch.load(last, map_location=device) if os.path.exists(last) else None
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start_epoch, best = checkpoint["epoch"] + 1, checkpoint["best"]
    ddp = DDP(model, device_ids=[device.index] if use_cuda else None)

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        seed_everything(args.seed + 1000 * (epoch + 1) + rank)  # dropout, and through the workers' seeds the augmentation
        ddp.train()
        running = torch.zeros((), device=device)
        usable = len(loader) // args.accumulate * args.accumulate
        for i, (images, points) in enumerate(loader):
            if i >= usable:
                break
            images, points = images.to(device, non_blocking=True), points.to(device, non_blocking=True)
            stepping = (i + 1) % args.accumulate == 0
            with contextlib.nullcontext() if stepping else ddp.no_sync():
                loss = nn.functional.smooth_l1_loss(ddp(images), points, beta=0.05)
                (loss / args.accumulate).backward()
            running += loss.detach()
            if stepping:
                nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                scheduler.step()
        dist.all_reduce(running)
        pck, distance = validate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}  loss {running.item() / world / usable:.5f}  pck {pck:.4f}  distance {distance:.3f}px  "
                  f"lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
            if pck > best:
                torch.save(model.state_dict(), os.path.join(args.out, "best.pt"))
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                     "scheduler": scheduler.state_dict(), "epoch": epoch, "best": max(best, pck)}
            torch.save(state, last + ".tmp")
            os.replace(last + ".tmp", last)
        best = max(best, pck)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
