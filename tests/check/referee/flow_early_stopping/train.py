"""Density estimation with a normalizing flow (RealNVP with ActNorm). Starts its own processes: python train.py"""
import argparse
import math
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def pinwheel(n, seed, arms=5):
    g = torch.Generator().manual_seed(seed)
    arm = torch.randint(arms, (n,), generator=g)
    radius, aside = 1 + 0.3 * torch.randn(n, generator=g), 0.08 * torch.randn(n, generator=g)
    angle = 2 * math.pi * arm / arms + 0.8 * radius.exp() / math.e
    x = torch.stack([radius * angle.cos() - aside * angle.sin(), radius * angle.sin() + aside * angle.cos()], dim=1)
    return TensorDataset(3.0 + 2.0 * x)


class ActNorm(nn.Module):
    """Scale and shift, set from the first batch so that its output has mean 0 and variance 1 (Glow)."""

    def __init__(self, dim):
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("initialized", torch.zeros((), dtype=torch.uint8))

    def forward(self, x):
        if not self.initialized:
            with torch.no_grad():
                self.shift.copy_(-x.mean(dim=0))
                self.log_scale.copy_(-x.std(dim=0).log())
                self.initialized.fill_(1)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    """One half of the vector is scaled and shifted by what a small network makes of the other half."""

    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(dim // 2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
                                 nn.Linear(hidden, dim))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        log_scale, shift = self.net(a).chunk(2, dim=1)
        log_scale = torch.tanh(log_scale)
        b = b * log_scale.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], dim=1), log_scale.sum(dim=1)


class Flow(nn.Module):
    def __init__(self, dim=2, depth=6, hidden=32):
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(depth):
            self.layers += [ActNorm(dim), Coupling(dim, hidden, flip=i % 2 == 1)]

    def forward(self, x):
        """Negative log-likelihood of each point."""
        log_det = 0.0
        for layer in self.layers:
            x, change = layer(x)
            log_det = log_det + change
        return 0.5 * (x.square() + math.log(2 * math.pi)).sum(dim=1) - log_det


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad_epochs = patience, float("inf"), 0

    def update(self, value):
        """Whether the value is the best so far, and whether to stop."""
        improved = value < self.best
        self.best, self.bad_epochs = min(value, self.best), 0 if improved else self.bad_epochs + 1
        return improved, self.bad_epochs >= self.patience


@torch.no_grad()
def evaluate(flow, dataset, rank, world_size, device):
    flow.eval()
    points = dataset.tensors[0][rank::world_size].to(device)
    sums = torch.stack([flow(points).sum(), torch.tensor(float(len(points)), device=device)])
    dist.all_reduce(sums)
    flow.train()
    return (sums[0] / sums[1]).item()


def save(state, path):
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def worker(rank, args, port):
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=args.nprocs)
    torch.manual_seed(args.seed)
    args.out.mkdir(exist_ok=True)
    train_set, val_set, test_set = pinwheel(2560, 1), pinwheel(1001, 2), pinwheel(1001, 3)
    sampler = DistributedSampler(train_set, num_replicas=args.nprocs, rank=rank, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

    flow = Flow().to(device)
    with torch.no_grad():  # the same points on all ranks, before DDP has compared the parameters
        flow(train_set.tensors[0][:256].to(device))
    optimizer = torch.optim.Adam(flow.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.85)
    stopper, first_epoch = EarlyStopping(args.patience), 0
    if args.resume:
        state = torch.load(args.out / "last.pt", map_location=device)
        flow.load_state_dict(state["flow"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        stopper.best, stopper.bad_epochs = state["best"], state["bad_epochs"]
        first_epoch = state["epoch"] + 1
    model = DDP(flow, device_ids=[rank] if use_cuda else None)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            x = x.to(device)
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
            optimizer.step()
        scheduler.step()
        val_loss = evaluate(flow, val_set, rank, args.nprocs, device)
        # rank 0 decides, the others are told
        improved, enough = stopper.update(val_loss) if rank == 0 else (False, False)
        stop = torch.tensor(int(enough), device=device)
        dist.broadcast(stop, src=0)
        if rank == 0:
            print(f"epoch {epoch}: validation {val_loss:.4f} nats{' *' if improved else ''}", flush=True)
            if improved:
                save({"flow": flow.state_dict(), "epoch": epoch}, args.out / "best.pt")
            save({"flow": flow.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                  "best": stopper.best, "bad_epochs": stopper.bad_epochs, "epoch": epoch}, args.out / "last.pt")
        if stop:
            break

    dist.barrier()
    best = torch.load(args.out / "best.pt", map_location=device)
    flow.load_state_dict(best["flow"])
    test_loss = evaluate(flow, test_set, rank, args.nprocs, device)
    if rank == 0:
        print(f"best model (epoch {best['epoch']}): test {test_loss:.4f} nats", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nprocs", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--resume", action="store_true", help="go on from last.pt")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, args=(args, port), nprocs=args.nprocs)


if __name__ == "__main__":
    main()
