"""Predict the energy of molecules with a graph network. Starts its own processes:

    python train.py --nprocs 2
    python train.py --nprocs 2 --resume
"""
import argparse
import math
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, Subset

from molecules import Molecules, collate
from network import MoleculeNet


class Normalizer:
    """Energies to numbers around zero and back."""

    def __init__(self, mean=0.0, std=1.0):
        self.mean, self.std = mean, std

    def normalize(self, energy):
        return ((energy - self.mean) / self.std).float()

    def restore(self, value):
        return value.double() * self.std + self.mean


def my_block(dataset, rank, world_size):
    """The rank's part of a data set: blocks one after the other, none left out, none twice."""
    return Subset(dataset, range(rank * len(dataset) // world_size, (rank + 1) * len(dataset) // world_size))


def fit_normalizer(train_set, rank, world_size, device):
    """Mean and standard deviation of the training energies. Building molecules is slow: each rank reads a block."""
    energies = torch.tensor([graph.energy for graph in my_block(train_set, rank, world_size)], dtype=torch.float64)
    sums = torch.stack([energies.sum(), energies.square().sum(), torch.tensor(float(len(energies)))]).to(device)
    dist.all_reduce(sums)
    total, squares, count = sums.tolist()
    mean = total / count
    return Normalizer(mean, math.sqrt(squares / count - mean ** 2))


def train_epoch(model, loader, optimizer, normalizer, device):
    model.train()
    sums = torch.zeros(2, device=device)
    for batch in loader:
        batch = batch.to(device)
        loss = F.smooth_l1_loss(model(batch), normalizer.normalize(batch.energy), beta=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums += torch.stack([loss.detach(), torch.ones_like(loss)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(net, loader, normalizer, device):
    """Mean absolute error and R2 over the whole validation set, in the unit of the energies."""
    net.eval()
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    for batch in loader:
        batch = batch.to(device)
        true, error = batch.energy, normalizer.restore(net(batch)) - batch.energy
        sums += torch.stack([error.abs().sum(), error.square().sum(), true.sum(), true.square().sum(),
                             torch.tensor(float(len(true)), device=device)])
    dist.all_reduce(sums)
    absolute, squared, total, squares, count = sums.tolist()
    r2 = 1 - squared / (squares - total ** 2 / count)
    return absolute / count, r2


def save(state, path):
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)


def worker(rank, world_size, args):
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world_size)
    torch.manual_seed(args.seed)

    molecules = Molecules(args.molecules, args.seed)
    train_set = Subset(molecules, [i for i in range(len(molecules)) if i % 6 != 5])
    val_set = Subset(molecules, [i for i in range(len(molecules)) if i % 6 == 5])
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)
    val_loader = DataLoader(my_block(val_set, rank, world_size), args.batch_size, collate_fn=collate)

    net = MoleculeNet().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=1e-4)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.4, patience=1, threshold=0.02)
    last, first_epoch, best = os.path.join(args.out, "last.pt"), 1, float("inf")
    if args.resume:
        state = torch.load(last, map_location="cpu", weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        normalizer = Normalizer(**state["normalizer"])
        first_epoch, best = state["epoch"] + 1, state["best"]
    else:
        normalizer = fit_normalizer(train_set, rank, world_size, device)
    model = DDP(net, device_ids=[rank] if cuda else None)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        print(f"{len(train_set)} molecules to learn from, {len(val_set)} to check; energy "
              f"{normalizer.mean:.1f} +- {normalizer.std:.1f}", flush=True)

    for epoch in range(first_epoch, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, train_loader, optimizer, normalizer, device)
        mae, r2 = evaluate(net, val_loader, normalizer, device)
        scheduler.step(mae)  # the same number in every process, so the learning rates stay equal
        improved, best = mae < best, min(mae, best)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.5f}  MAE {mae:.2f}  R2 {r2:.4f}  "
                  f"lr {optimizer.param_groups[0]['lr']:.1e}", flush=True)
            state = {"epoch": epoch, "best": best, "net": net.state_dict(), "optimizer": optimizer.state_dict(),
                     "scheduler": scheduler.state_dict(), "normalizer": vars(normalizer)}
            save(state, last)
            if improved:
                save(state, os.path.join(args.out, "best.pt"))
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nprocs", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--molecules", type=int, default=1203)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=25, help="molecules per process")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", default="runs")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(free_port())
    mp.spawn(worker, args=(args.nprocs, args), nprocs=args.nprocs, join=True)


if __name__ == "__main__":
    main()
