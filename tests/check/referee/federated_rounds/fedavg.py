#!/usr/bin/env python
"""Simulated federated learning: FedAvg with server momentum, the clients of a round are shared by the GPUs.

usage: python fedavg.py --gpus 2
"""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

N_CLASSES, DIM = 6, 20


def make_clients(n_clients, seed=0):
    """Clients of very different size, each with two or three of the classes most of the time (non-IID)."""
    g = torch.Generator().manual_seed(seed)
    centers = 1.6 * torch.randn(N_CLASSES, 2, DIM, generator=g)  # two modes per class

    def draw(n, probs):
        y = torch.multinomial(probs, n, replacement=True, generator=g)
        mode = torch.randint(2, (n,), generator=g)
        return centers[y, mode] + 1.3 * torch.randn(n, DIM, generator=g), y

    clients = []
    for _ in range(n_clients):
        probs = 0.05 + torch.rand(N_CLASSES, generator=g) ** 6
        n = int(20 + 200 * torch.rand(1, generator=g) ** 2)
        clients.append((draw(n, probs), draw(max(8, n // 5), probs)))
    return clients


def build():
    return nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, N_CLASSES))


def flatten(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def unflatten(model, vector):
    nn.utils.vector_to_parameters(vector, model.parameters())


def local_training(model, data, args, lr, gen):
    x, y = data
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(args.local_epochs):
        for idx in torch.randperm(len(x), generator=gen).split(args.batch_size):
            idx = idx.to(x.device)
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def federated_eval(model, clients, rank, world_size, device):
    """Accuracy over the test samples of all clients; every process evaluates its share of the clients."""
    stats = torch.zeros(2, device=device)
    for client in range(rank, len(clients), world_size):
        x, y = (t.to(device) for t in clients[client][1])
        stats[0] += (model(x).argmax(1) == y).sum()
        stats[1] += len(y)
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def worker(rank, args):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(args.port))
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo", rank=rank, world_size=args.gpus)
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(rank)

    clients = make_clients(args.clients)
    torch.manual_seed(args.seed)
    server, local = build().to(device), build().to(device)
    weights = flatten(server)
    velocity = torch.zeros_like(weights)
    first = 0
    if args.resume and os.path.exists(args.ckpt):
        ckpt = torch.load(args.ckpt, map_location=device)
        weights, velocity, first = ckpt["weights"], ckpt["velocity"], ckpt["round"] + 1
        unflatten(server, weights)

    for rnd in range(first, args.rounds):
        # all processes draw the same cohort: the seed depends on the round only
        cohort = random.Random(args.seed + rnd).sample(range(args.clients), args.cohort)
        lr = args.client_lr * 0.97**rnd
        update = torch.zeros_like(weights)
        samples = torch.zeros(1, device=device)
        loss_sum = torch.zeros(1, device=device)
        for client in cohort[rank :: args.gpus]:
            data = tuple(t.to(device) for t in clients[client][0])
            gen = torch.Generator().manual_seed(1000 * rnd + client)
            unflatten(local, weights.clone())
            loss = local_training(local, data, args, lr, gen)
            n = len(data[0])
            update += n * (flatten(local) - weights)
            samples += n
            loss_sum += n * loss

        dist.all_reduce(update)
        dist.all_reduce(samples)
        dist.all_reduce(loss_sum)
        velocity = args.server_momentum * velocity + update / samples
        weights = weights + args.server_lr * velocity
        unflatten(server, weights)

        if (rnd + 1) % 5 == 0 or rnd + 1 == args.rounds:
            acc = federated_eval(server, clients, rank, args.gpus, device)
            if rank == 0:
                print("round %d  client loss %.4f  accuracy over all clients %.4f" % (rnd + 1, loss_sum / samples, acc))
                torch.save({"weights": weights, "velocity": velocity, "round": rnd}, args.ckpt + ".tmp")
                os.replace(args.ckpt + ".tmp", args.ckpt)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2)
    ap.add_argument("--clients", type=int, default=30)
    ap.add_argument("--cohort", type=int, default=10, help="clients per round")
    ap.add_argument("--rounds", type=int, default=30)
    ap.add_argument("--local-epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--client-lr", type=float, default=0.02)
    ap.add_argument("--server-lr", type=float, default=1.0)
    ap.add_argument("--server-momentum", type=float, default=0.5)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--port", type=int, default=29577)
    ap.add_argument("--ckpt", default="server.pt")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    mp.spawn(worker, args=(args,), nprocs=args.gpus)
