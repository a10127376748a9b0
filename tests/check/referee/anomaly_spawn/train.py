"""Autoencoder that finds faults in the sensor readings of a fleet of machines, one process per GPU.

    python train.py             # on all GPUs, or in two CPU processes
    python train.py --resume    # goes on after the last epoch that was finished
"""
import argparse
import os
import socket
from itertools import islice

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

NUM_MACHINES, NUM_SENSORS = 12, 16


def read_machine(machine, split, n):
    """Readings of one machine: three hidden loads drive all sensors; older machines are noisier and run elsewhere."""
    plant = torch.Generator().manual_seed(0)
    mixing = torch.randn(3, 2, NUM_SENSORS, generator=plant)
    unit = 10 ** (4 * torch.rand(NUM_SENSORS, generator=plant) - 1)  # volts, kelvins, pascals ...
    level, drift = 5 * torch.randn(NUM_SENSORS, generator=plant), 3 * torch.randn(NUM_SENSORS, generator=plant)
    g = torch.Generator().manual_seed(1 + 3 * machine + ("train", "val", "test").index(split))
    age = machine / (NUM_MACHINES - 1)
    load = torch.randn(n, 3, generator=g)
    signal = load @ mixing[:, 0] + 0.3 * torch.cos(load) @ mixing[:, 1]
    noise = (0.1 + 0.6 * age ** 2) * torch.randn(n, NUM_SENSORS, generator=g)
    return unit * (level + drift * age + signal + noise)


def read_fleet(machines, split, n):
    return torch.cat([read_machine(m, split, n) for m in machines])


def with_faults(readings, seed):
    """A tenth of the readings get half of their sensors from another reading: each value is usual, but not together."""
    g = torch.Generator().manual_seed(seed)
    faulty = torch.rand(len(readings), generator=g) < 0.1
    swapped = readings.clone()
    swapped[:, ::2] = readings[torch.randperm(len(readings), generator=g), ::2]
    return torch.where(faulty.unsqueeze(1), swapped, readings), faulty


class Autoencoder(nn.Module):
    """Takes raw readings: the standardisation is part of the model and saved with its weights."""

    def __init__(self, mean, std, hidden=64, code=4):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.encoder = nn.Sequential(nn.Linear(NUM_SENSORS, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.GELU(), nn.Linear(hidden, NUM_SENSORS))

    def forward(self, readings, corruption=0.0):
        x = (readings - self.mean) / self.std
        noisy = x + corruption * torch.randn_like(x) if corruption else x
        return (self.decoder(self.encoder(noisy)) - x).square().mean(dim=1)


def mean_and_std(readings, device):
    """Mean and standard deviation of every sensor over the training data of all ranks."""
    x = readings.double()
    sums = torch.stack([x.sum(dim=0), x.square().sum(dim=0), torch.full_like(x[0], len(x))]).to(device)
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return mean.float(), (sums[1] / sums[2] - mean.square()).clamp_min(1e-12).sqrt().float()


def gather_all(values):
    """The values of all ranks one after another; ranks may have different numbers of them."""
    longest = torch.tensor(len(values), device=values.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = nn.functional.pad(values, (0, longest.item() - len(values)), value=float("nan"))
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    values = torch.cat(parts)
    return values[~values.isnan()]


class EarlyStopping:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad_epochs = float("inf"), 0

    def step(self, loss):
        """Returns whether this is the best loss so far, and whether it is time to stop."""
        improved = loss < self.best * (1 - self.min_delta)
        self.best, self.bad_epochs = (loss, 0) if improved else (self.best, self.bad_epochs + 1)
        return improved, self.bad_epochs >= self.patience


def save(state, path):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def train(rank, world_size, port, args):
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}",
                            rank=rank, world_size=world_size)

    # every rank reads the recordings of its own machines only
    machines = torch.arange(NUM_MACHINES).tensor_split(world_size)[rank].tolist()
    train_readings = read_fleet(machines, "train", 192)
    val_readings = read_fleet(machines, "val", 50).to(device)
    order = torch.Generator()
    loader = DataLoader(TensorDataset(train_readings), args.batch_size, shuffle=True, drop_last=True, generator=order)
    steps = torch.tensor(len(loader), device=device)
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)  # some ranks may have a machine more

    torch.manual_seed(args.seed)
    net = Autoencoder(*mean_and_std(train_readings, device)).to(device)
    model = DDP(net, device_ids=[rank] if use_cuda else None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.05)
    stopper = EarlyStopping(args.patience, min_delta=0.02)
    last, best = os.path.join(args.output_dir, "last.pt"), os.path.join(args.output_dir, "best.pt")
    epoch, stop = 0, False
    if args.resume and os.path.exists(last):
        state = torch.load(last, map_location=device)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        vars(stopper).update(state["stopper"])
        epoch, stop = state["epoch"], state["stop"]

    while epoch < args.epochs and not stop:
        order.manual_seed(args.seed + 1000 * epoch + rank)
        torch.manual_seed(args.seed + 1000 * epoch + rank)  # every rank corrupts its readings in its own way
        train_loss = torch.zeros((), device=device)
        for (readings,) in islice(loader, steps.item()):
            loss = model(readings.to(device), corruption=0.1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_loss += loss.detach()
        dist.all_reduce(train_loss)
        with torch.no_grad():
            errors = net(val_readings)
        total = torch.stack([errors.sum(), torch.tensor(float(len(errors)), device=device)])
        dist.all_reduce(total)
        val_loss = (total[0] / total[1]).item()
        scheduler.step(val_loss)
        improved, stop = stopper.step(val_loss)
        stop = torch.tensor(int(stop), device=device)
        dist.broadcast(stop, src=0)  # all ranks leave the loop in the same epoch
        epoch, stop = epoch + 1, bool(stop)
        if rank == 0:
            print(f"epoch {epoch}: train {train_loss.item() / steps.item() / world_size:.4f}, val {val_loss:.4f}, "
                  f"lr {optimizer.param_groups[0]['lr']:.1e}", flush=True)
            os.makedirs(args.output_dir, exist_ok=True)
            if improved:
                save({"model": net.state_dict(), "epoch": epoch}, best)
            save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                  "stopper": vars(stopper), "epoch": epoch, "stop": stop}, last)

    dist.barrier()  # the best weights are on disk
    net.load_state_dict(torch.load(best, map_location=device)["model"])
    test_readings, faulty = with_faults(read_fleet(machines, "test", 100), seed=args.seed + rank)
    with torch.no_grad():
        val_errors, scores = net(val_readings), net(test_readings.to(device))
    threshold = torch.quantile(gather_all(val_errors), args.quantile)
    alarm, faulty = scores > threshold, faulty.to(device)
    counts = torch.stack([(alarm & faulty).sum(), faulty.sum(), (alarm & ~faulty).sum(), (~faulty).sum()])
    dist.all_reduce(counts)
    if rank == 0:
        found, faults, false_alarms, healthy = counts.tolist()
        save({"model": net.state_dict(), "threshold": threshold.item()}, os.path.join(args.output_dir, "detector.pt"))
        print(f"threshold {threshold.item():.4f}: {100 * found / faults:.1f}% of the faults found, "
              f"{100 * false_alarms / healthy:.1f}% false alarms", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nprocs", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="per process")
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--patience", type=int, default=4, help="epochs without a better validation loss")
    parser.add_argument("--quantile", type=float, default=0.98, help="of the validation errors, as the threshold")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(train, args=(args.nprocs, port, args), nprocs=args.nprocs)


if __name__ == "__main__":
    main()
