"""Segmentation of synthetic point clouds with a PointNet-like model (DistributedDataParallel).

    torchrun --nproc-per-node=2 train.py [--resume last.pt]

A cloud is a lamp or a mug on a table: every point belongs to one of four parts. Lamps are rare (1 of 8), so the sampler draws
both kinds equally often. The best checkpoint is chosen with the mean IoU of the whole validation set.
"""
import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

PARTS = ("table", "body", "handle", "shade")


class Clouds(Dataset):
    """Cloud i is always the same one: (points [n, 3], part of each point [n])."""
    def __init__(self, size, seed, n_points=128):
        self.size, self.seed, self.n_points = size, seed, n_points
        self.kinds = (torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 1 / 8).long()  # 1: lamp, 0: mug

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_003 + i)
        n, lamp = self.n_points, bool(self.kinds[i])
        part = torch.multinomial(torch.tensor([0.4, 0.3, 0.0, 0.3] if lamp else [0.4, 0.4, 0.2, 0.0]), n, True, generator=g)
        angle, h, r = 2 * math.pi * torch.rand(n, generator=g), torch.rand(n, generator=g), torch.rand(n, generator=g).sqrt()
        table = torch.stack([r * angle.cos(), r * angle.sin(), 0 * h], 1)
        width = 0.12 if lamp else 0.4
        body = torch.stack([width * angle.cos(), width * angle.sin(), (0.9 if lamp else 0.7) * h], 1)
        handle = torch.stack([0.4 + 0.25 * (math.pi * h).sin(), 0 * h, 0.35 + 0.25 * (math.pi * h).cos()], 1)
        shade = torch.stack([(0.5 - 0.3 * h) * angle.cos(), (0.5 - 0.3 * h) * angle.sin(), 0.6 + 0.4 * h], 1)
        points = torch.stack([table, body, handle, shade], 1)[torch.arange(n), part]
        turn, size = 2 * math.pi * torch.rand((), generator=g), 0.7 + 0.6 * torch.rand((), generator=g)
        points = size * points @ torch.tensor([[turn.cos(), -turn.sin(), 0], [turn.sin(), turn.cos(), 0], [0, 0, 1]])
        return points + 0.02 * torch.randn(n, 3, generator=g), part


class BalancedDistributedSampler(Sampler):
    """Draws with replacement, all kinds equally often; every process takes its share of the same list of draws."""
    def __init__(self, kinds, rank, world, seed):
        self.weights = 1.0 / torch.bincount(kinds)[kinds].double()
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0
        self.total = len(kinds) // world * world

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.total // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        draws = torch.multinomial(self.weights, self.total, replacement=True, generator=g)
        return iter(draws[self.rank::self.world].tolist())


class PointNetSeg(nn.Module):
    def __init__(self, n_parts, width=48):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.wide = nn.Sequential(nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(3 * width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, n_parts))

    def forward(self, points):
        local = self.local(points)
        whole = self.wide(local).amax(1, keepdim=True).expand(-1, points.shape[1], -1)
        return self.head(torch.cat([local, whole], -1))


@torch.no_grad()
def evaluate(net, loader, device):
    """Loss and IoU of each part, over the clouds of all processes."""
    net.eval()
    k = len(PARTS)
    confusion, loss = torch.zeros(k, k, device=device), torch.zeros(2, device=device, dtype=torch.float64)
    for points, part in loader:
        points, part = points.to(device), part.to(device)
        scores = net(points)
        confusion += torch.bincount((part * k + scores.argmax(-1)).flatten(), minlength=k * k).view(k, k)
        loss[0] += F.cross_entropy(scores.flatten(0, 1), part.flatten(), reduction="sum")
        loss[1] += part.numel()
    dist.all_reduce(confusion)
    dist.all_reduce(loss)
    hits = confusion.diag()
    iou = hits / (confusion.sum(0) + confusion.sum(1) - hits).clamp(min=1)
    return (loss[0] / loss[1]).item(), iou.tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=24, help="clouds in one step, over all processes")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    local_rank, on_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    assert args.batch_size % world == 0, f"--batch-size has to be divisible by {world}"
    train_set, val_set = Clouds(288, seed=args.seed + 1), Clouds(45, seed=args.seed + 2)
    sampler = BalancedDistributedSampler(train_set.kinds, rank, world, args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=32)

    torch.manual_seed(args.seed)
    model = DDP(PointNetSeg(len(PARTS)).to(device), device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
    first_epoch, best = 0, 0.0
    if args.resume:
        state = torch.load(args.resume, map_location=device)
        model.module.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch, best = state["epoch"] + 1, state["best"]

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        train_loss = torch.zeros((), device=device)
        for points, part in train_loader:
            scores = model(points.to(device))
            loss = F.cross_entropy(scores.flatten(0, 1), part.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            train_loss += loss.detach()
        dist.all_reduce(train_loss)
        val_loss, iou = evaluate(model.module, val_loader, device)
        scheduler.step(val_loss)
        mean_iou = sum(iou) / len(iou)
        is_best, best = mean_iou > best, max(best, mean_iou)
        if rank == 0:
            print(f"epoch {epoch}  train loss {train_loss.item() / (world * len(train_loader)):.4f}  val loss {val_loss:.4f}"
                  f"  mean IoU {mean_iou:.4f}  {[round(v, 2) for v in iou]}  lr {optimizer.param_groups[0]['lr']:.4f}", flush=True)
            torch.save({"net": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch, "best": best}, args.out / "last.tmp")
            os.replace(args.out / "last.tmp", args.out / "last.pt")
            if is_best:
                torch.save(model.module.state_dict(), args.out / "best.pt")
    if rank == 0:
        print(f"best mean IoU {best:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
