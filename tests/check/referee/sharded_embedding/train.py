"""Click prediction: the embedding table is sharded by id over the GPUs (model parallel, all-to-all), the MLP is DDP.

torchrun --nproc-per-node=2 train.py
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def exchange(x, send, recv):
    out = x.new_empty((sum(recv),) + x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), recv, send)
    return out


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.splits = send, recv
        return exchange(x, send, recv)

    @staticmethod
    def backward(ctx, grad):
        send, recv = ctx.splits
        return exchange(grad, recv, send), None, None


class ShardedEmbedding(nn.Module):
    """Row i of the table is row i // world_size of rank i % world_size."""

    def __init__(self, num_rows, dim, seed=0):
        super().__init__()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.num_rows = num_rows
        gen = torch.Generator().manual_seed(seed)
        table = 0.1 * torch.randn(num_rows, dim, generator=gen)
        self.local = nn.Parameter(table[self.rank :: self.world_size].clone())

    def forward(self, ids):
        """ids (batch, fields) -> vectors (batch, fields, dim); a collective call."""
        flat = ids.flatten()
        owner = flat % self.world_size
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=self.world_size)
        recv_counts = torch.empty_like(counts)
        dist.all_to_all_single(recv_counts, counts)
        send, recv = counts.tolist(), recv_counts.tolist()

        wanted = exchange(flat[order], send, recv)  # the ids that the other ranks want from this one
        rows = F.embedding(wanted // self.world_size, self.local)
        rows = Exchange.apply(rows, recv, send)  # back to those who asked
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return rows[back].view(*ids.shape, -1)

    def full_table(self):
        """The whole table in the order of the ids; all ranks must call it."""
        rows = -(-self.num_rows // self.world_size)
        padded = self.local.new_zeros(rows, self.local.shape[1])
        padded[: len(self.local)] = self.local.detach()
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return torch.stack(parts, dim=1).flatten(0, 1)[: self.num_rows]

    def load_full_table(self, table):
        with torch.no_grad():
            self.local.copy_(table[self.rank :: self.world_size])


class Clicks:
    """Users, items and contexts with hidden taste vectors; ids follow a power law."""

    def __init__(self, sizes, n, seed):
        world = torch.Generator().manual_seed(99)
        taste = [torch.randn(s, 4, generator=world) for s in sizes]
        gen = torch.Generator().manual_seed(seed)
        cols = [(s * torch.rand(n, generator=gen) ** 2.5).long() for s in sizes]
        u, i, c = (t[k] for t, k in zip(taste, cols))
        logits = (u * i).sum(1) + (i * c).sum(1) - 0.5
        self.y = (torch.sigmoid(1.5 * logits) > torch.rand(n, generator=gen)).float()
        offsets = torch.tensor([0, sizes[0], sizes[0] + sizes[1]])
        self.ids = torch.stack(cols, dim=1) + offsets  # one table for all fields


def evaluate(table, mlp, data, rank, world_size, device, batch_size):
    """Log loss and accuracy over the whole test set. Every rank needs the same number of look-ups."""
    sums = torch.zeros(3, device=device)
    n = len(data.y) // world_size  # the test set is a multiple of the world size
    ids, y = data.ids[rank * n : (rank + 1) * n].to(device), data.y[rank * n : (rank + 1) * n].to(device)
    mlp.eval()
    with torch.no_grad():
        for a, b in zip(ids.split(batch_size), y.split(batch_size)):
            logits = mlp.module(table(a))
            sums[0] += F.binary_cross_entropy_with_logits(logits, b, reduction="sum")
            sums[1] += ((logits > 0).float() == b).sum()
            sums[2] += len(b)
    mlp.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main(args):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    sizes = (301, 200, 40)
    train, test = Clicks(sizes, 16384, seed=1), Clicks(sizes, 4096, seed=2)
    table = ShardedEmbedding(sum(sizes), args.dim).to(device)
    torch.manual_seed(args.seed)
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(3 * args.dim, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0)).to(device)
    mlp = DistributedDataParallel(mlp, device_ids=[device.index] if cuda else None)
    dense_opt = torch.optim.Adam(mlp.parameters(), lr=args.lr)
    table_opt = torch.optim.SGD(table.parameters(), lr=args.table_lr)

    start = 0
    if args.resume:
        ckpt = torch.load(args.ckpt, map_location=device)
        table.load_full_table(ckpt["table"])
        mlp.module.load_state_dict(ckpt["mlp"])
        dense_opt.load_state_dict(ckpt["dense_opt"])
        start = ckpt["epoch"]

    n = len(train.y) // world_size
    for epoch in range(start, args.epochs):
        perm = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(args.seed + epoch))
        mine = perm[rank * n : (rank + 1) * n]
        running = 0.0
        for idx in mine.split(args.batch_size):
            ids, y = train.ids[idx].to(device), train.y[idx].to(device)
            loss = F.binary_cross_entropy_with_logits(mlp(table(ids)), y)
            dense_opt.zero_grad()
            table_opt.zero_grad()
            loss.backward()
            # DDP averages; the table got the sum of the gradients of all ranks
            table.local.grad /= world_size
            dense_opt.step()
            table_opt.step()
            running += loss.item() * len(idx)
        logloss, acc = evaluate(table, mlp, test, rank, world_size, device, args.batch_size)
        full = table.full_table()
        if rank == 0:
            print(f"epoch {epoch}: train {running / n:.4f}, test log loss {logloss:.4f}, accuracy {acc:.4f}", flush=True)
            state = {"table": full, "mlp": mlp.module.state_dict(), "dense_opt": dense_opt.state_dict(), "epoch": epoch + 1}
            torch.save(state, args.ckpt)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128, help="per GPU")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--table-lr", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--ckpt", default="clicks.pt")
    parser.add_argument("--resume", action="store_true")
    main(parser.parse_args())
