"""Node classification on a citation-like graph with sampled neighbours (GraphSAGE), several processes by torch.multiprocessing.

    python train.py --processes=2

Every start continues from run/last.pt if it exists.
"""
import argparse
import copy
import os
import socket
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

CLASSES, WORDS = 5, 48


def make_graph(nodes=1500, seed=4):
    """Papers with few, noisy words; most of their neighbours belong to the same topic."""
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(0, CLASSES, (nodes,), generator=g)
    prototypes = torch.randn(CLASSES, WORDS, generator=g)
    words = 0.35 * prototypes[topic] + torch.randn(nodes, WORDS, generator=g)
    ends = torch.randint(0, nodes, (2, 60 * nodes), generator=g)
    same = topic[ends[0]] == topic[ends[1]]
    ends = ends[:, torch.rand(ends.size(1), generator=g) < torch.where(same, 0.2, 0.02)]
    ends = torch.cat([ends, ends.flip(0), torch.arange(nodes).repeat(2, 1)], 1)
    ends = ends[:, ends[0].argsort(stable=True)]
    degree = torch.bincount(ends[0], minlength=nodes)
    start = degree.cumsum(0) - degree
    order = torch.randperm(nodes, generator=g)
    return words, topic, (ends[1], start, degree), order[:900], order[900:]


def sample_neighbours(edges, fanout, generator):
    """A table of `fanout` random neighbours for every node."""
    target, start, degree = edges
    pick = (torch.rand(len(degree), fanout, generator=generator) * degree[:, None]).long()
    return target[start[:, None] + pick]


class Sage(nn.Module):
    def __init__(self, hidden=48, dropout=0.4):
        super().__init__()
        self.first = nn.Linear(2 * WORDS, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.second = nn.Linear(2 * hidden, CLASSES)
        self.dropout = dropout

    def layer(self, words, table, nodes):
        near = words[table[nodes]].mean(-2)
        hidden = F.relu(self.norm(self.first(torch.cat([words[nodes], near], -1))))
        return F.dropout(hidden, self.dropout, self.training)

    def forward(self, words, table, nodes):
        own = self.layer(words, table, nodes)
        near = self.layer(words, table, table[nodes]).mean(-2)
        return self.second(torch.cat([own, near], -1))


@torch.no_grad()
def accuracy(net, words, table, topic, nodes, rank, world):
    was_training = net.training
    net.eval()
    mine = nodes[rank::world]
    right = (net(words, table, mine).argmax(-1) == topic[mine]).sum().double()
    net.train(was_training)
    dist.all_reduce(right)
    return right.item() / len(nodes)


def work(rank, world, port, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    words, topic, edges, train_nodes, val_nodes = make_graph()
    words, topic = words.to(device), topic.to(device)
    torch.manual_seed(0)
    net = Sage(dropout=args.dropout).to(device)
    ema = copy.deepcopy(net).requires_grad_(False).eval()
    model = DDP(net, device_ids=[rank] if cuda else None)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    steps = len(train_nodes) // args.batch
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * args.epochs)

    path, first = os.path.join(args.out, "last.pt"), 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        net.load_state_dict(state["net"])
        ema.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1

    fixed = sample_neighbours(edges, 15, torch.Generator().manual_seed(99)).to(device)
    for epoch in range(first, args.epochs):
        # the same table and the same order of nodes on all ranks, but other dropout masks
        common = torch.Generator().manual_seed(1000 + epoch)
        table = sample_neighbours(edges, args.fanout, common).to(device)
        order = train_nodes[torch.randperm(len(train_nodes), generator=common)]
        torch.manual_seed(7919 * (epoch + 1) + rank)
        mean_loss = torch.zeros((), device=device)
        for step in range(steps):
            mine = order[step * args.batch:(step + 1) * args.batch][rank::world].to(device)
            parts = mine.chunk(args.accumulate)
            optimizer.zero_grad(set_to_none=True)
            for i, nodes in enumerate(parts):
                # the gradients are averaged once per step, with the last part
                with nullcontext() if i == len(parts) - 1 else model.no_sync():
                    loss = F.cross_entropy(model(words, table, nodes), topic[nodes], reduction="sum")
                    loss = loss * world / args.batch
                    loss.backward()
                mean_loss += loss.detach() / steps
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), net.parameters()):
                    slow.lerp_(fast, 1 - args.ema)
        dist.all_reduce(mean_loss)
        train_acc = accuracy(net, words, fixed, topic, train_nodes, rank, world)
        val_acc = accuracy(ema, words, fixed, topic, val_nodes, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean_loss.item() / world:.4f}  train accuracy {train_acc:.4f}  "
                  f"validation accuracy (EMA) {val_acc:.4f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save({"net": net.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=90, help="nodes per step over all processes")
    parser.add_argument("--accumulate", type=int, default=3)
    parser.add_argument("--fanout", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--ema", type=float, default=0.95)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, (args.processes, port, args), nprocs=args.processes)


if __name__ == "__main__":
    main()
