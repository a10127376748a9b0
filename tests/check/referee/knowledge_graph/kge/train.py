"""Link prediction with TransE, one process per GPU (or two on a machine without):  python -m kge.train --epochs 6"""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from kge.data import corrupt, known_tails, make_graph
from kge.model import TransE


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entities", type=int, default=600)
    parser.add_argument("--relations", type=int, default=5)
    parser.add_argument("--dim", type=int, default=24)
    parser.add_argument("--margin", type=float, default=1.0)
    parser.add_argument("--negatives", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="triples per process")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--checkpoint", default="transe.pt")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


@torch.no_grad()
def project(entities):
    """TransE keeps all entities on the unit sphere."""
    entities.weight.copy_(F.normalize(entities.weight, dim=1))


@torch.no_grad()
def evaluate(net, triples, known, device):
    """Mean reciprocal rank and hits@10 over the validation triples of all processes."""
    sums = torch.zeros(3, device=device)
    for head, relation, tail in triples.to(device):
        rank = net.rank_of_tail(head, relation, tail, known)
        sums += torch.stack([1 / rank, (rank <= 10).float(), torch.ones_like(rank, dtype=torch.float)])
    dist.all_reduce(sums)
    return (sums[:2] / sums[2]).tolist()


def train_epoch(model, optimizer, triples, generator, args, device):
    net, total, steps = model.module, 0.0, len(triples) // args.batch_size
    order = torch.randperm(len(triples), generator=generator)
    for batch in order[:steps * args.batch_size].view(steps, args.batch_size):
        positives = triples[batch].to(device)
        negatives = corrupt(positives, args.entities, args.negatives, generator).to(device)
        optimizer.zero_grad()
        loss = model(positives, negatives)
        loss.backward()
        optimizer.step()
        project(net.entities)
        total += loss.detach()
    mean = torch.as_tensor(total / steps, device=device)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def worker(rank, args, port):
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("nccl" if use_cuda else "gloo", rank=rank, world_size=args.processes)

    train, valid = make_graph(args.entities, args.relations, args.seed)
    known = known_tails(torch.cat([train, valid]))
    # each process keeps a share of its own; the shares of the training triples are equally large
    train = train[:len(train) // args.processes * args.processes][rank::args.processes]
    valid = valid[rank::args.processes]

    torch.manual_seed(args.seed)
    net = TransE(args.entities, args.relations, args.dim, args.margin).to(device)
    project(net.entities)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=args.lr)
    start = 0
    if args.resume:
        state = torch.load(args.checkpoint, map_location=device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    model = DDP(net, device_ids=[rank] if use_cuda else None)

    for epoch in range(start, args.epochs):
        generator = torch.Generator().manual_seed(args.seed + 100_000 * rank + epoch)
        loss = train_epoch(model, optimizer, train, generator, args, device)
        mrr, hits = evaluate(net, valid, known, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, MRR {mrr:.3f}, hits@10 {hits:.3f}", flush=True)
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                       args.checkpoint + ".tmp")
            os.replace(args.checkpoint + ".tmp", args.checkpoint)
    dist.destroy_process_group()


def main():
    args = parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, args=(args, port), nprocs=args.processes)


if __name__ == "__main__":
    main()
