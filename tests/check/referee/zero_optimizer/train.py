"""Surrogate model for a simulator: DDP, with AdamW's state spread over the GPUs by ZeroRedundancyOptimizer."""

import argparse
import math
import os
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

INPUTS, OUTPUTS = 6, 3


def simulate(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(count, INPUTS, generator=generator) - 1
    y = torch.stack([torch.sin(3 * x[:, 0]) * x[:, 1], x[:, 2] * x[:, 3] + x[:, 4], x[:, 5] ** 2 - x[:, 0]], dim=1)
    return x, y + 0.02 * torch.randn(count, OUTPUTS, generator=generator)


class Surrogate(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.enter = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth))
        self.leave = nn.Linear(width, OUTPUTS)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def save_checkpoint(path, net, optimizer, schedule, epoch, best):
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                 "epoch": epoch, "best": best}
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


@torch.no_grad()
def r_squared(net, x, y, device):
    """Coefficient of determination over the whole validation set, of which each rank computes a part."""
    net.eval()
    x, y = (t[dist.get_rank()::dist.get_world_size()].to(device) for t in (x, y))
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        predicted = net(x).float()
    sums = torch.stack([torch.full_like(y[0], len(y)), y.sum(0), (y ** 2).sum(0), ((predicted - y) ** 2).sum(0)])
    dist.all_reduce(sums)
    count, total, squares, errors = sums.double()
    net.train()
    return (1 - errors / (squares - total ** 2 / count)).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="per GPU and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    rank, world = dist.get_rank(), dist.get_world_size()
    os.makedirs(args.out, exist_ok=True)
    train_set, (val_x, val_y) = TensorDataset(*simulate(1536, seed=0)), simulate(250, seed=1)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True, pin_memory=True)
    steps = len(loader) // args.accumulate

    torch.manual_seed(0)
    net = Surrogate(width=48, depth=2).to(device)
    model = DDP(net, device_ids=[local_rank])
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / (steps * args.epochs))))

    first_epoch, best = 0, -math.inf
    last = os.path.join(args.out, "last.pt")
    if args.resume and os.path.exists(last):
        state = torch.load(last, map_location="cpu")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first_epoch, best = state["epoch"], state["best"]

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device=device)
        for i, (x, y) in enumerate(islice(loader, steps * args.accumulate)):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            update = (i + 1) % args.accumulate == 0
            with nullcontext() if update else model.no_sync():
                with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                    loss = F.mse_loss(model(x).float(), y)
                (loss / args.accumulate).backward()
            running += loss.detach()
            if update:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        dist.all_reduce(running)
        score = r_squared(net, val_x, val_y, device)
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / (steps * args.accumulate * world):.4f} R2 {score:.4f}")
        if score > best:
            best = score
            save_checkpoint(os.path.join(args.out, "best.pt"), net, optimizer, schedule, epoch + 1, best)
        save_checkpoint(last, net, optimizer, schedule, epoch + 1, best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
