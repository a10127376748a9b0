"""Forecast of hourly load curves with missing readings: TCN + DDP, gradient accumulation, plateau schedule, checkpoint and resume."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAST, HORIZON = 48, 12


def make_series(meters=20, hours=1200, seed=11):
    """Load of some meters (daily and weekly rhythm, drift, noise) and which of its readings exist."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(float(hours))
    phase, size = 6.3 * torch.rand(meters, 1, generator=g), 0.5 + torch.rand(meters, 1, generator=g)
    load = size * (6.2832 * t / 24 + phase).sin() + 0.4 * (6.2832 * t / 168 + 2 * phase).sin()
    load = load + 0.02 * torch.randn(meters, hours, generator=g).cumsum(1) + 0.15 * torch.randn(meters, hours, generator=g)
    gaps = torch.linspace(0.0, 0.6, meters)[:, None]
    return load * 12 + 40, (torch.rand(meters, hours, generator=g) > gaps).float()


class Windows(Dataset):
    def __init__(self, load, seen, starts):
        self.load, self.seen = load, seen
        self.places = [(m, s) for m in range(len(load)) for s in starts]

    def __len__(self):
        return len(self.places)

    def __getitem__(self, i):
        m, s = self.places[i]
        load, seen = self.load[m, s:s + PAST + HORIZON], self.seen[m, s:s + PAST + HORIZON]
        return torch.stack([load * seen, seen])[:, :PAST], load[PAST:], seen[PAST:]


class Block(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Forecaster(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inp = nn.Conv1d(2, width, 3, padding=1)
        self.blocks = nn.Sequential(*[Block(width, 2 ** k) for k in range(4)])
        self.out = nn.Linear(width * PAST // 4, HORIZON)

    def forward(self, x):
        x = self.blocks(self.inp(x))
        return self.out(nn.functional.avg_pool1d(x, 4).flatten(1))


def squared_error(forecast, target, seen):
    return ((forecast - target).square() * seen).sum()


@torch.no_grad()
def evaluate(model, loader, device):
    """Mean squared error over all readings of the validation windows; each rank does a part of the windows."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for past, target, seen in loader:
        past, target, seen = past.to(device), target.to(device), seen.to(device)
        sums += torch.stack([squared_error(model(past), target, seen), seen.sum()])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=96, help="windows per optimizer step over all ranks")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(3)

    load, seen = make_series()
    mean = (load * seen)[:, :1000].sum() / seen[:, :1000].sum()
    std = (((load - mean).square() * seen)[:, :1000].sum() / seen[:, :1000].sum()).sqrt()
    load = (load - mean) / std
    train = Windows(load, seen, range(0, 940, 20))
    valid = Windows(load, seen, range(1000, 1140, 10))
    valid.places = valid.places[rank * len(valid) // world:(rank + 1) * len(valid) // world]
    sampler = DistributedSampler(train, shuffle=True, seed=7, drop_last=True)
    micro = args.batch // world // args.accum
    loader = DataLoader(train, batch_size=micro, sampler=sampler, drop_last=True, pin_memory=cuda)
    valid_loader = DataLoader(valid, batch_size=100)
    steps = len(loader) // args.accum

    net = Forecaster().to(device)
    model = DDP(net, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.22)

    path = os.path.join(args.out, "last.pt")
    first, best = 0, float("inf")
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first, best = state["epoch"] + 1, state["best"]

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        total = 0.0
        for step in range(steps):
            group = [[t.to(device) for t in next(batches)] for _ in range(args.accum)]
            readings = sum(seen.sum() for _, _, seen in group)
            dist.all_reduce(readings)
            optimizer.zero_grad(set_to_none=True)
            for k, (past, target, seen) in enumerate(group):
                last = k == args.accum - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = squared_error(model(past), target, seen) * world / readings
                    loss.backward()
                total += loss.detach() / steps
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        dist.all_reduce(total)
        mse = evaluate(net, valid_loader, device)
        scheduler.step(mse)
        if rank == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch}: train {total.item() / world:.4f}, validation mse {mse:.4f}, lr {lr:.5f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            if mse < best:
                torch.save(net.state_dict(), os.path.join(args.out, "best.pt"))
        best = min(best, mse)
        if rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                        "epoch": epoch, "best": best}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
