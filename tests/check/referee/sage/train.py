#!/usr/bin/env python
# GraphSAGE with hand-rolled neighbour sampling on a single (synthetic) citation-like graph.
#
#   torchrun --nproc-per-node=2 train.py --epochs 8
#   torchrun --nproc-per-node=2 train.py --epochs 12 --resume
#
# The whole graph lives on every rank (CSR arrays in host memory), only the seed nodes are split.
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=8)
p.add_argument("--batch", type=int, default=64, help="seed nodes per rank and step")
p.add_argument("--fanout", type=int, nargs=2, default=[6, 6])
p.add_argument("--hidden", type=int, default=48)
p.add_argument("--lr", type=float, default=2e-2)
p.add_argument("--seed", type=int, default=7)
p.add_argument("--ckpt", default="sage.pt")
p.add_argument("--resume", action="store_true")
args = p.parse_args()


class Graph:
    """Stochastic block model with skewed class sizes; features alone are nearly useless."""

    def __init__(self, n=5001, degree=10, dim=16, homophily=0.6, seed=0):
        rng = np.random.default_rng(seed)
        self.num_classes = 7
        prior = np.array([0.32, 0.25, 0.18, 0.12, 0.07, 0.04, 0.02])
        self.y = rng.choice(self.num_classes, n, p=prior)
        by_class = [np.flatnonzero(self.y == c) for c in range(self.num_classes)]
        src = np.repeat(np.arange(n), degree // 2)
        dst = rng.integers(0, n, len(src))
        alike = rng.random(len(src)) < homophily
        for c in range(self.num_classes):
            hit = alike & (self.y[src] == c)
            dst[hit] = rng.choice(by_class[c], hit.sum())
        # undirected, plus a self loop so that no node is without neighbours
        row = np.concatenate([src, dst, np.arange(n)])
        col = np.concatenate([dst, src, np.arange(n)])
        self.indices = col[np.argsort(row, kind="stable")]
        self.indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))])
        centres = rng.normal(size=(self.num_classes, dim))
        self.x = (0.5 * centres[self.y] + rng.normal(size=(n, dim))).astype(np.float32)
        perm = rng.permutation(n)
        self.train, self.val = perm[: int(0.6 * n)], perm[int(0.85 * n):]

    def neighbours(self, nodes, k, rng):
        """k neighbours (with replacement) of each node -> array of shape nodes.shape + (k,)"""
        start, deg = self.indptr[nodes], self.indptr[nodes + 1] - self.indptr[nodes]
        pick = (rng.random(nodes.shape + (k,)) * deg[..., None]).astype(np.int64)
        return self.indices[start[..., None] + pick]

    def block(self, seeds, fanout, rng, device):
        one = self.neighbours(seeds, fanout[0], rng)
        two = self.neighbours(one, fanout[1], rng)
        xs = [torch.from_numpy(self.x[i]).to(device) for i in (seeds, one, two)]
        return xs, torch.from_numpy(self.y[seeds]).to(device)


class SAGE(nn.Module):
    def __init__(self, dim, hidden, classes):
        super().__init__()
        self.self1, self.nbr1 = nn.Linear(dim, hidden), nn.Linear(dim, hidden, bias=False)
        self.self2, self.nbr2 = nn.Linear(hidden, classes), nn.Linear(hidden, classes, bias=False)

    def forward(self, x0, x1, x2):
        h0 = F.relu(self.self1(x0) + self.nbr1(x1.mean(-2)))
        h1 = F.relu(self.self1(x1) + self.nbr1(x2.mean(-2)))
        h0, h1 = (F.dropout(h, 0.2, self.training) for h in (h0, h1))
        return self.self2(h0) + self.nbr2(h1.mean(-2))


def macro_f1(pred, true, num_classes):
    hit = F.one_hot(true[pred == true], num_classes).sum(0)
    counts = torch.stack([hit, F.one_hot(pred, num_classes).sum(0), F.one_hot(true, num_classes).sum(0)])
    dist.all_reduce(counts)
    tp, predicted, actual = counts.double()
    return (2 * tp / (predicted + actual).clamp(min=1)).mean().item()


@torch.no_grad()
def evaluate(net, graph, rank, world, device):
    net.eval()
    rng = np.random.default_rng(args.seed + 10_000 + rank)
    logits, labels = [], []
    mine = graph.val[rank::world]
    for i in range(0, len(mine), 512):
        xs, y = graph.block(mine[i:i + 512], [10, 10], rng, device)
        logits.append(net(*xs))
        labels.append(y)
    logits, labels = torch.cat(logits), torch.cat(labels)
    nll = torch.stack([F.cross_entropy(logits, labels, reduction="sum"), torch.tensor(float(len(labels)), device=device)])
    dist.all_reduce(nll)
    f1 = macro_f1(logits.argmax(1), labels, graph.num_classes)
    return f1, (nll[0] / nll[1]).item()


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    graph = Graph()
    torch.manual_seed(args.seed)
    net = SAGE(graph.x.shape[1], args.hidden, graph.num_classes).to(device)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr, weight_decay=1e-4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.4, patience=0, threshold=0.01)
    first = 0
    if args.resume:
        saved = torch.load(args.ckpt, map_location=device, weights_only=True)
        net.load_state_dict(saved["net"])
        opt.load_state_dict(saved["opt"])
        plateau.load_state_dict(saved["plateau"])
        first = saved["epoch"] + 1
    ddp = DistributedDataParallel(net, device_ids=[device.index] if cuda else None)

    # same number of full batches on every rank, otherwise the all-reduce of the last step waits forever
    steps = len(graph.train) // (args.batch * world)
    for epoch in range(first, args.epochs):
        order = np.random.default_rng([args.seed, epoch]).permutation(graph.train)
        mine = order[rank::world]
        rng = np.random.default_rng([args.seed, epoch, rank + 1])  # neighbours
        torch.manual_seed(args.seed + 1 + epoch * world + rank)  # dropout
        ddp.train()
        running = torch.zeros((), device=device)
        for step in range(steps):
            xs, y = graph.block(mine[step * args.batch:(step + 1) * args.batch], args.fanout, rng, device)
            loss = F.cross_entropy(ddp(*xs), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += loss.detach()
        train_loss = running / steps
        f1, val_loss = evaluate(net, graph, rank, world, device)
        plateau.step(val_loss)
        dist.reduce(train_loss, dst=0)
        if rank == 0:
            print(f"epoch {epoch:2d}  train {train_loss.item() / world:.4f}  val {val_loss:.4f}  "
                  f"macro-F1 {f1:.4f}  next lr {opt.param_groups[0]['lr']:.5f}", flush=True)
            state = dict(net=net.state_dict(), opt=opt.state_dict(), plateau=plateau.state_dict(), epoch=epoch)
            torch.save(state, args.ckpt + ".part")
            os.replace(args.ckpt + ".part", args.ckpt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
