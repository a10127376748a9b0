"""Data parallel training without DistributedDataParallel: we broadcast the model and reduce gradients in buckets."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class GradientBuckets:
    """Groups parameters, last ones first, and averages the gradients of a group with one all-reduce."""

    def __init__(self, module, bucket_bytes):
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
        self.buckets, size = [[]], 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if size >= bucket_bytes:
                self.buckets, size = [*self.buckets, []], 0
            self.buckets[-1].append(p)
            size += p.numel() * p.element_size()

    def average(self):
        pending = []
        for bucket in self.buckets:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            pending.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in pending:
            work.wait()
            flat /= dist.get_world_size()
            for p, grad in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = grad.view_as(p)


class Block(nn.Module):
    """A residual block that is skipped now and then (stochastic depth)."""

    def __init__(self, dim, drop):
        super().__init__()
        self.drop = drop
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        if self.training and torch.rand(()) < self.drop:
            return x
        return x + self.net(x)


def make_model(features, classes, dim=48, depth=4):
    blocks = [Block(dim, drop=0.3 * i / depth) for i in range(depth)]
    return nn.Sequential(nn.Linear(features, dim), *blocks, nn.LayerNorm(dim), nn.Linear(dim, classes))


def make_data(n, features, classes, seed):
    gen = torch.Generator().manual_seed(seed)
    centers = torch.randn(2 * classes, features, generator=torch.Generator().manual_seed(0))
    cluster = torch.randint(2 * classes, (n,), generator=gen)
    return TensorDataset(centers[cluster] + 1.2 * torch.randn(n, features, generator=gen), cluster % classes)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    stats = torch.zeros(3).cuda()  # loss, correct, samples
    for x, y in loader:
        out, y = model(x.cuda()), y.cuda()
        stats[0] += F.cross_entropy(out, y, reduction="sum")
        stats[1] += (out.argmax(dim=1) == y).sum()
        stats[2] += len(y)
    dist.all_reduce(stats)
    return (stats[:2] / stats[2]).tolist()


def save(path, **state):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--bucket-kb", type=int, default=32)
    parser.add_argument("--checkpoint", type=Path, default="checkpoints/last.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, val_set = make_data(1280, 20, 6, seed=1), make_data(250, 20, 6, seed=2)
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), args.batch_size)
    torch.manual_seed(0)
    model = make_model(features=20, classes=6).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    start_epoch = 0
    if args.resume:
        state = torch.load(args.checkpoint, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch = state["epoch"] + 1
    buckets = GradientBuckets(model, args.bucket_kb * 1024)
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(1000 * (epoch + 1) + rank)  # each rank skips other blocks
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            buckets.average()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        val_loss, accuracy = validate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: validation loss {val_loss:.3f}, accuracy {accuracy:.3f}", flush=True)
            save(args.checkpoint, model=model.state_dict(), optimizer=optimizer.state_dict(), epoch=epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
