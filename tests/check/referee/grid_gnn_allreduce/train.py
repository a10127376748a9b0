"""Potentials in small power grids with a message-passing network. No DDP: parameters are broadcast and gradients summed by hand.

    torchrun --nproc-per-node=2 train.py
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector


def make_grids(n, seed):
    """Random grids of 6 to 30 nodes. Inputs: current and load of each node, conductance of each line; target: the potentials."""
    g = torch.Generator().manual_seed(seed)
    grids = []
    for _ in range(n):
        nodes = int(torch.randint(6, 31, (1,), generator=g))
        tree = torch.tensor([[i, int(torch.randint(max(0, i - 4), i, (1,), generator=g))] for i in range(1, nodes)])
        more = torch.randint(0, nodes, (nodes // 3, 2), generator=g)
        lines = torch.cat([tree, more[more[:, 0] != more[:, 1]]]).t()
        conductance = 0.3 + 2 * torch.rand(lines.shape[1], generator=g)
        load = 0.2 + torch.rand(nodes, generator=g)
        current = 6 * torch.rand(nodes, generator=g) * (torch.rand(nodes, generator=g) < 0.3) + 3
        a = torch.diag(load)
        for (i, j), c in zip(lines.t().tolist(), conductance):
            a[i, i] += c
            a[j, j] += c
            a[i, j] -= c
            a[j, i] -= c
        target = torch.linalg.solve(a, current)
        edges = torch.cat([lines, lines.flip(0)], 1)
        grids.append((torch.stack([current, load], 1), edges, conductance.repeat(2)[:, None], target[:, None]))
    return grids


def collate(grids, device):
    """One big graph out of several."""
    offset, x, edges, lines, y = 0, [], [], [], []
    for nodes, edge, line, target in grids:
        x.append(nodes)
        edges.append(edge + offset)
        lines.append(line)
        y.append(target)
        offset += len(nodes)
    return torch.cat(x).to(device), torch.cat(edges, 1).to(device), torch.cat(lines).to(device), torch.cat(y).to(device)


def all_sum(tensor):
    dist.all_reduce(tensor)
    return tensor


class Normalizer(nn.Module):
    """Running mean and deviation of everything seen so far, as in MeshGraphNets; the sums are those of all processes."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("total", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(width, dtype=torch.float64))

    @torch.no_grad()
    def observe(self, x):
        x = x.double()
        new = torch.cat([x.new_full((1,), len(x)), x.sum(0), x.square().sum(0)])
        dist.all_reduce(new)
        self.count += new[0]
        self.total += new[1:1 + x.shape[1]]
        self.squares += new[1 + x.shape[1]:]

    def moments(self):
        mean = self.total / self.count
        return mean.float(), (self.squares / self.count - mean ** 2).clamp(min=1e-8).sqrt().float()

    def forward(self, x):
        mean, std = self.moments()
        return (x - mean) / std

    def back(self, x):
        mean, std = self.moments()
        return x * std + mean


def mlp(cin, width, cout):
    return nn.Sequential(nn.Linear(cin, width), nn.SiLU(), nn.Linear(width, cout))


class GridNet(nn.Module):
    def __init__(self, width=32, rounds=4):
        super().__init__()
        self.norm_x, self.norm_y = Normalizer(2), Normalizer(1)
        self.enter = mlp(2, width, width)
        self.message = nn.ModuleList(mlp(2 * width + 1, width, width) for _ in range(rounds))
        self.update = nn.ModuleList(mlp(2 * width, width, width) for _ in range(rounds))
        self.leave = mlp(width, width, 1)

    def forward(self, x, edges, lines):
        h = self.enter(self.norm_x(x))
        source, sink = edges
        for message, update in zip(self.message, self.update):
            m = message(torch.cat([h[source], h[sink], lines], 1))
            h = h + update(torch.cat([h, torch.zeros_like(h).index_add(0, sink, m)], 1))
        return self.leave(h)


def reduce_gradients(model):
    """Sum over the processes, in one buffer. The losses are already divided by the number of nodes of all processes."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


@torch.no_grad()
def validate(model, grids, rank, world, device):
    """Mean squared and mean absolute error over all nodes of all validation grids."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    mine = grids[rank::world]
    for at in range(0, len(mine), 64):
        x, edges, lines, y = collate(mine[at:at + 64], device)
        error = model.norm_y.back(model(x, edges, lines)) - y
        sums += torch.stack([error.square().sum(), error.abs().sum(), error.new_tensor(len(y))]).double()
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=60, help="grids per step, all processes together")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--clip", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    train, val = make_grids(450, seed=1), make_grids(31, seed=2)
    model = GridNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)

    os.makedirs(args.out, exist_ok=True)
    path, first = os.path.join(args.out, "last.pt"), 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)

    for epoch in range(first, args.epochs):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1000 * args.seed + epoch)).tolist()
        seen = torch.zeros(2, dtype=torch.float64, device=device)
        for at in range(0, len(order), args.batch):
            batch = order[at:at + args.batch]  # the last one may be smaller
            x, edges, lines, y = collate([train[i] for i in batch[rank::world]], device)
            model.norm_x.observe(x)
            model.norm_y.observe(y)
            error = (model(x, edges, lines) - model.norm_y(y)).square().sum()
            nodes = all_sum(torch.tensor(float(len(y)), device=device))  # grids differ in size, so processes differ in nodes
            loss = error / nodes
            optimizer.zero_grad()
            loss.backward()
            reduce_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            seen += torch.stack([error.detach(), error.new_tensor(len(y))]).double()
        dist.all_reduce(seen)
        mse, mae = validate(model, val, rank, world, device)
        scheduler.step(mse)
        if rank == 0:
            lr = optimizer.param_groups[0]["lr"]
            size = parameters_to_vector(model.parameters()).norm().item()
            print(f"epoch {epoch}: loss {seen[0] / seen[1]:.4f}, val mse {mse:.4f}, mae {mae:.4f}, lr {lr:.5f}, |w| {size:.3f}", flush=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                        "epoch": epoch}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
