"""Multi-series load forecasting with DDP: every rank holds its own share of the meters."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

CONTEXT, HORIZON = 48, 12


def load_meter(meter, length=900):
    """Hourly load of one meter: level, daily and weekly cycle, trend and noise (a file in real life)."""
    gen = torch.Generator().manual_seed(1234 + meter)
    level, daily, weekly, phase = (1 + torch.rand(4, generator=gen)).tolist()
    t = torch.arange(length, dtype=torch.float32)
    series = daily * torch.sin(2 * torch.pi * (t / 24 + phase)) + 0.5 * weekly * torch.sin(2 * torch.pi * t / 168)
    series = series + 0.0005 * t + 0.3 * torch.randn(length, generator=gen)
    return level * (3 + meter / 4) + (1 + meter / 16) * series


def mean_std(train):
    """Normalisation statistics of the training part of the meters."""
    values = train.double()
    stats = torch.stack([values.sum(), values.square().sum(), torch.full_like(values[0, 0], values.numel())])
    dist.all_reduce(stats)
    mean = stats[0] / stats[2]
    std = (stats[1] / stats[2] - mean.square()).sqrt()
    return mean.float(), std.float()


class Forecaster(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, HORIZON)

    def forward(self, x):
        """The next HORIZON values, predicted relative to the last observed one."""
        _, h = self.rnn(x.unsqueeze(-1))
        return x[:, -1:] + self.head(h[-1])


@torch.no_grad()
def mean_abs_error(model, series, std):
    """Mean absolute error in physical units over all windows of all meters on all ranks."""
    windows = series.unfold(1, CONTEXT + HORIZON, HORIZON).flatten(0, 1)
    error = (model(windows[:, :CONTEXT]) - windows[:, CONTEXT:]).abs() * std
    total = torch.stack([error.sum(), torch.full_like(error[0, 0], error.numel())])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def save(obj, path):
    torch.save(obj, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--meters", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps-per-epoch", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=32, help="windows per rank")
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    os.makedirs(args.out, exist_ok=True)

    mine = torch.arange(args.meters).tensor_split(world)[rank].tolist()  # neighbouring meters share a rank
    series = torch.stack([load_meter(m) for m in mine]).to(device)
    mean, std = mean_std(series[:, :600])
    series = (series - mean) / std
    train, valid, test = series[:, :600], series[:, 600 - CONTEXT:750], series[:, 750 - CONTEXT:]

    torch.manual_seed(args.seed)
    model = DDP(Forecaster().to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.9)
    sample_gen = torch.Generator().manual_seed(args.seed + 1 + rank)  # windows of this rank

    start, best_val = 0, float("inf")
    last_path, best_path = os.path.join(args.out, "last.pt"), os.path.join(args.out, "best.pt")
    if os.path.exists(last_path):
        ckpt = torch.load(last_path, map_location="cpu")
        model.module.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["opt"])
        sched.load_state_dict(ckpt["sched"])
        sample_gen.set_state(ckpt["sample_gen"][rank])
        best_val = ckpt["best_val"]
        start = ckpt["epoch"]

    for epoch in range(start, args.epochs):
        running = torch.zeros((), device=device)
        for _ in range(args.steps_per_epoch):
            row = torch.randint(0, len(mine), (args.batch_size, 1), generator=sample_gen)
            first = torch.randint(0, train.shape[1] - CONTEXT - HORIZON, (args.batch_size, 1), generator=sample_gen)
            batch = train[row.to(device), (first + torch.arange(CONTEXT + HORIZON)).to(device)]
            loss = nn.functional.smooth_l1_loss(model(batch[:, :CONTEXT]), batch[:, CONTEXT:])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            running += loss.detach() / args.steps_per_epoch
        sched.step()

        dist.all_reduce(running)
        val = mean_abs_error(model.module, valid, std)
        is_best = val < best_val
        best_val = min(val, best_val)
        gens = [None] * world
        dist.all_gather_object(gens, sample_gen.get_state())
        if rank == 0:
            print(f"epoch {epoch + 1} loss {running.item() / world:.4f} val MAE {val:.4f}", flush=True)
            if is_best:
                save({"model": model.module.state_dict(), "mean": mean, "std": std, "epoch": epoch + 1}, best_path)
            save({"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                  "sample_gen": gens, "best_val": best_val, "epoch": epoch + 1}, last_path)

    dist.barrier()  # best.pt is complete before the other ranks read it
    best = torch.load(best_path, map_location=device)
    model.module.load_state_dict(best["model"])
    test_mae = mean_abs_error(model.module, test, std)
    if rank == 0:
        print(f"test MAE {test_mae:.4f} with the model of epoch {best['epoch']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
