"""Behaviour cloning of a controller from trajectory shards that are streamed, split over ranks and loader workers.

Every start trains --epochs epochs, on top of those in the checkpoint that it finds in --out.
"""
import argparse
import glob
import os
import shutil

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def step(state, action):
    pos, vel, goal = state.split(2, dim=-1)  # a point mass; the action is a force
    vel = vel + 0.1 * action
    return torch.cat([pos + 0.1 * vel, vel, goal], dim=-1)


def starts(n, far, generator):
    spread = 2.5 if far else 0.8  # the two sites at which data were recorded
    pos, goal = torch.randn(2, n, 2, generator=generator) * spread
    return torch.cat([pos + spread, torch.zeros(n, 2), goal + spread], dim=-1)


def expert(state):
    pos, vel, goal = state.split(2, dim=-1)
    return (3.0 * (goal - pos) - 2.5 * vel).clamp(-2, 2)


def record(folder, n_shards=12):
    os.makedirs(folder + ".tmp", exist_ok=True)
    g = torch.Generator().manual_seed(11)
    for s in range(n_shards):
        state, obs, act = starts(17 + 2 * (s % 4), s % 2 == 0, g), [], []
        for _ in range(40):
            obs.append(state)
            act.append(expert(state))
            state = step(state, act[-1] + 0.3 * torch.randn(len(state), 2, generator=g))
        np.savez(f"{folder}.tmp/shard-{s:03d}.npz", obs=torch.stack(obs, 1).flatten(0, 1), act=torch.stack(act, 1).flatten(0, 1))
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(folder + ".tmp", folder)


class Shards(IterableDataset):
    """The steps of this rank's shards; every worker reads its share of them through a shuffle buffer."""

    def __init__(self, shards, rank, seed=0, buffer=1000):
        self.shards, self.rank, self.seed, self.buffer, self.epoch = shards, rank, seed, buffer, 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rng = np.random.default_rng([self.seed, self.epoch, self.rank, worker])
        waiting = []
        for shard in rng.permutation(self.shards[worker::workers]):
            with np.load(shard) as f:
                steps = zip(torch.from_numpy(f["obs"]), torch.from_numpy(f["act"]))
            for one in steps:
                waiting.append(one)
                if len(waiting) > self.buffer:
                    i = rng.integers(len(waiting))
                    waiting[i], waiting[-1] = waiting[-1], waiting[i]
                    yield waiting.pop()
        rng.shuffle(waiting)
        yield from waiting


@torch.no_grad()
def success(policy, mean, std, device, n=301):
    """Share of closed-loop runs that end near the goal."""
    policy.eval()
    g = torch.Generator().manual_seed(5)
    state = torch.cat([starts(n // 2, True, g), starts(n - n // 2, False, g)])[dist.get_rank()::dist.get_world_size()].to(device)
    for _ in range(60):
        state = step(state, policy((state - mean) / std))
    near = (state[:, :2] - state[:, 4:]).norm(dim=-1) < 0.15
    counts = torch.tensor([near.sum().item(), len(near)], dtype=torch.float64, device=device)
    dist.all_reduce(counts)
    policy.train()
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=192, help="steps per update over all ranks")
    parser.add_argument("--workers", type=int, default=2, help="loader workers per rank")
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    folder, path = os.path.join(args.out, "shards"), os.path.join(args.out, "checkpoint.pt")
    if rank == 0 and not os.path.isdir(folder):
        record(folder)
    dist.barrier()

    shards, batch = sorted(glob.glob(folder + "/*.npz"))[rank::world], args.batch // world
    data = Shards(shards, rank)
    loader = DataLoader(data, batch_size=batch, drop_last=True, num_workers=args.workers, pin_memory=cuda)

    # one look at this rank's shards: sums for the normalisation, and how many batches its workers will have
    lengths, sums = [], torch.zeros(13, dtype=torch.float64, device=device)
    for shard in shards:
        with np.load(shard) as f:
            obs = torch.from_numpy(f["obs"]).to(device, torch.float64)
        lengths.append(len(obs))
        sums += torch.cat([obs.sum(0), (obs ** 2).sum(0), torch.tensor([len(obs)], dtype=torch.float64, device=device)])
    dist.all_reduce(sums)
    mean = sums[:6] / sums[12]
    mean, std = mean.float(), (sums[6:12] / sums[12] - mean ** 2).sqrt().float()
    workers = max(1, args.workers)
    n_batches = torch.tensor(sum(sum(lengths[w::workers]) // batch for w in range(workers)), device=device)
    dist.all_reduce(n_batches, dist.ReduceOp.MIN)  # shards differ in length; all ranks stop after the same number of batches

    policy = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)).to(device)
    model = DDP(policy, device_ids=[device.index] if cuda else None)
    opt = torch.optim.Adam(policy.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 20) * 0.995 ** i)
    first = 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        policy.load_state_dict(state["policy"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        mean, std, first = state["mean"], state["std"], state["epoch"] + 1

    for epoch in range(first, first + args.epochs):
        data.epoch = epoch  # the workers, started anew for every epoch, take it along
        total = torch.zeros((), device=device)
        for _, (obs, act) in zip(range(int(n_batches)), loader):
            loss = nn.functional.mse_loss(model((obs.to(device) - mean) / std), act.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            total += loss.detach() / n_batches
        dist.all_reduce(total)
        rate = success(policy, mean, std, device)
        if rank == 0:
            print(f"epoch {epoch}: {n_batches} batches, loss {total.item() / world:.4f}, success {rate:.3f}", flush=True)
            torch.save({"policy": policy.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                        "mean": mean, "std": std, "epoch": epoch}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
