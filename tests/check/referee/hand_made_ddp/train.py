"""Data parallelism without DistributedDataParallel: broadcast once, then all-reduce flat buckets of gradients."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ResidualMLP(nn.Module):
    """Regression net with stochastic depth: in training every block is skipped with probability drop."""

    def __init__(self, width=48, depth=4, drop=0.2):
        super().__init__()
        self.drop = drop
        self.stem = nn.Linear(2, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if not self.training:
                x = x + block(x)
            elif torch.rand(()) >= self.drop:
                x = x + block(x) / (1 - self.drop)
        return self.head(x).squeeze(1)


class GradientAverager:
    """Keeps the replicas of a module equal; call average() between backward and the optimizer's step."""

    def __init__(self, module, bucket_numel):
        self.world_size = dist.get_world_size()
        self.buckets, bucket = [], []
        for p in reversed(list(module.parameters())):
            dist.broadcast(p.detach(), src=0)
            bucket.append(p)
            if sum(q.numel() for q in bucket) >= bucket_numel:
                self.buckets.append(bucket)
                bucket = []
        if bucket:
            self.buckets.append(bucket)

    @torch.no_grad()
    def average(self):
        pending = []
        for bucket in self.buckets:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([g.flatten() for g in grads])
            pending.append((bucket, flat, dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True)))
        for bucket, flat, work in pending:
            work.wait()
            flat /= self.world_size
            for p, g in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = g.view_as(p)


def make_data(n, seed):
    x = 2 * torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return TensorDataset(x, torch.sin(math.pi * x[:, 0]) * torch.cos(math.pi * x[:, 1]))


@torch.no_grad()
def validate(model, dataset, rank, world_size, device):
    model.eval()
    x, y = (t[rank::world_size].to(device) for t in dataset.tensors)
    totals = torch.stack([F.mse_loss(model(x), y, reduction="sum"), torch.tensor(float(len(y)), device=device)])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--bucket-numel", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed + rank)
    train_set, val_set = make_data(1000, seed=1), make_data(201, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    model = ResidualMLP().to(device)
    averager = GradientAverager(model, args.bucket_numel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    path, start_epoch = os.path.join(args.checkpoint_dir, "last.pt"), 0
    if args.resume and os.path.exists(path):
        state = torch.load(path, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"][rank])
        start_epoch = state["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            averager.average()
            optimizer.step()
        val_loss = validate(model, val_set, rank, world_size, device)
        rng_states = [None] * world_size
        dist.all_gather_object(rng_states, torch.get_rng_state())
        if rank == 0:
            print(f"epoch {epoch}  val loss {val_loss:.4f}", flush=True)
            os.makedirs(args.checkpoint_dir, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch,
                        "rng": rng_states}, path + ".tmp")
            os.replace(path + ".tmp", path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
