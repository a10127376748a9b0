"""Regression of a property of small random graphs: batches of graphs of like size, mp.spawn, plateau schedule, best model.

Started with plain python. A second start continues from the last checkpoint in --out up to --epochs.
"""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

FEATURES, LARGEST = 6, 24


def make_graphs(n, seed):
    """Graphs of 6 to LARGEST nodes: features, adjacency, numbers of nodes, and a target that needs neighbours of neighbours."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(6, LARGEST + 1, (n,), generator=g)
    here = (torch.arange(LARGEST) < sizes[:, None]).float()
    edges = (torch.rand(n, LARGEST, LARGEST, generator=g) < 3 / sizes[:, None, None]).float().triu(1)
    edges = (edges + edges.transpose(1, 2)) * here[:, :, None] * here[:, None]
    nodes = 20 + 4 * torch.randn(n, LARGEST, FEATURES, generator=g)
    x = (nodes - 20) / 4 * here[:, :, None]
    near = edges @ x / edges.sum(2, keepdim=True).clamp(min=1)
    target = ((x[..., 0] * near[..., 1]).tanh() + (edges @ near[..., 2:3]).squeeze(2).tanh()).sum(1) / sizes
    target += edges.sum((1, 2)) / sizes / 4
    return {"nodes": nodes, "edges": edges, "sizes": sizes, "target": target}


class Graphs(Dataset):
    def __init__(self, nodes, edges, sizes, target):
        self.nodes, self.edges, self.sizes, self.target = nodes, edges, sizes, target

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, i):
        return self.nodes[i], self.edges[i], self.sizes[i], self.target[i]


def collate(graphs):
    """Cuts the batch to the size of its largest graph."""
    nodes, edges, sizes, target = map(torch.stack, zip(*graphs))
    m = int(sizes.max())
    return nodes[:, :m], edges[:, :m, :m], sizes, target


class BucketSampler(Sampler):
    """Batches of graphs of similar size. All ranks draw the same global batches; each takes its part of every one."""

    def __init__(self, sizes, batch, rank, world, seed=0, pool=10):
        self.sizes, self.batch, self.rank, self.world, self.seed, self.pool = sizes, batch, rank, world, seed, pool
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.sizes) // (self.batch * self.world)

    def __iter__(self):
        g = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        whole = self.batch * self.world
        batches = []
        for pool in torch.randperm(len(self.sizes), generator=g)[:len(self) * whole].split(self.pool * whole):
            batches += pool[self.sizes[pool].argsort(stable=True)].split(whole)
        for k in torch.randperm(len(batches), generator=g).tolist():
            yield batches[k][self.rank::self.world].tolist()


class GraphNet(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.near = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, nodes, edges, sizes):
        here = (torch.arange(nodes.shape[1], device=nodes.device) < sizes[:, None]).float()[..., None]
        spread = edges / edges.sum(2, keepdim=True).clamp(min=1)
        x = F.silu(self.first(nodes * here))
        for own, near, norm in zip(self.own, self.near, self.norms):
            x = x + F.silu(norm(own(x) + spread @ near(x)))
        x = torch.cat([x, edges.sum(2, keepdim=True) / 4], 2)[..., :-1] * (1 + edges.sum(2, keepdim=True) / 8)
        return self.head((x * here).sum(1) / sizes[:, None]).squeeze(1)


@torch.no_grad()
def evaluate(model, graphs, mean, std, device):
    """Mean squared error over all graphs; each rank does its part of them."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for index in torch.arange(len(graphs))[dist.get_rank()::dist.get_world_size()].split(100):
        nodes, edges, sizes, target = (part.to(device) for part in collate([graphs[i] for i in index.tolist()]))
        sums[0] += (model((nodes - mean) / std, edges, sizes) - target).square().sum()
        sums[1] += len(index)
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def save(state, path):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def worker(rank, world, port, train, val, mean, std, args):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    torch.manual_seed(args.seed)

    train["nodes"] = (train["nodes"] - mean) / std
    train, val = Graphs(**train), Graphs(**val)
    sampler = BucketSampler(train.sizes, args.batch // world, rank, world, args.seed)
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate, pin_memory=cuda)

    model = GraphNet().to(device)
    ddp = DDP(model, device_ids=[rank] if cuda else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
    last, best_path = os.path.join(args.out, "last.pt"), os.path.join(args.out, "best.pt")
    first, best = 0, float("inf")
    if os.path.exists(last):
        state = torch.load(last, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        plateau.load_state_dict(state["plateau"])
        first, best = state["epoch"] + 1, state["best"]

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device=device)
        for i, (nodes, edges, sizes, target) in enumerate(loader):
            nodes, edges, sizes, target = (t.to(device, non_blocking=True) for t in (nodes, edges, sizes, target))
            loss = F.mse_loss(ddp(nodes, edges, sizes), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach() / len(loader)

            if (i + 1) % args.eval_every == 0 or i + 1 == len(loader):
                error = evaluate(model, val, mean.to(device), std.to(device), device)
                plateau.step(error)
                if error < best:
                    best = error
                    if rank == 0:
                        save({"model": model.state_dict(), "error": error, "epoch": epoch}, best_path)
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch}: loss {running.item() / world:.4f}, validation {error:.4f}, best {best:.4f}, "
                  f"lr {optimizer.param_groups[0]['lr']:.2e}", flush=True)
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "plateau": plateau.state_dict(),
                  "epoch": epoch, "best": best}, last)
        dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=96, help="graphs per step over all processes")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--procs", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    os.makedirs(args.out, exist_ok=True)
    train, val = make_graphs(5760, seed=1), make_graphs(1000, seed=2)
    mean, std = train["nodes"].mean((0, 1)), train["nodes"].std((0, 1))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, (args.procs, port, train, val, mean, std, args), nprocs=args.procs)


if __name__ == "__main__":
    main()
