"""Load forecasting: a GRU predicts the next day from the last four, trained by a DeepSpeed engine (ZeRO stage 2)."""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

HISTORY, HORIZON = 96, 24


class Forecaster(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.rnn = nn.GRU(HORIZON, hidden, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden), nn.SiLU(),
                                  nn.Linear(2 * hidden, HORIZON))

    def forward(self, history):
        days = history.unflatten(1, (-1, HORIZON))
        states, _ = self.rnn(days)
        return self.head(states[:, -1]) + days[:, -1]


def make_series(hours, seed):
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(hours, dtype=torch.float32)
    daily = torch.sin(2 * torch.pi * t / 24) + 0.5 * torch.sin(4 * torch.pi * t / 24 + 1.0)
    three_days = torch.sin(2 * torch.pi * t / 72)
    return daily * (1 + 0.6 * three_days) + three_days + 0.1 * torch.randn(hours, generator=generator)


def make_windows(hours, seed):
    windows = make_series(hours, seed).unfold(0, HISTORY + HORIZON, 2)
    return TensorDataset(windows[:, :HISTORY].contiguous(), windows[:, HISTORY:].contiguous())


def mean_over_ranks(total, count, device):
    sums = torch.tensor([float(total), float(count)], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(engine, loader):
    engine.eval()
    error, count = 0.0, 0
    for history, target in loader:
        history, target = history.to(engine.device), target.to(engine.device)
        forecast = engine.module(history.to(torch.bfloat16)).float()
        error += (forecast - target).abs().sum().item()
        count += target.numel()
    engine.train()
    return mean_over_ranks(error, count, engine.device)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--save-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=os.path.join(os.path.dirname(os.path.abspath(__file__)), "ds_config.json"))
    return parser.parse_args()


def main():
    args = parse_args()
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1234)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=args, model=model, optimizer=optimizer, model_parameters=model.parameters())

    train_set, val_set = make_windows(1500, seed=0), make_windows(420, seed=1)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler,
                              drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=64)
    micro_steps = len(train_loader) // engine.gradient_accumulation_steps() * engine.gradient_accumulation_steps()

    start_epoch = 0
    if args.resume:
        path, client_state = engine.load_checkpoint(args.save_dir)
        if path is not None:
            start_epoch = client_state["epoch"]

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        loss_sum = 0.0
        for micro_step, (history, target) in enumerate(train_loader):
            if micro_step == micro_steps:
                break
            forecast = engine(history.to(engine.device, torch.bfloat16))
            loss = F.smooth_l1_loss(forecast.float(), target.to(engine.device))
            engine.backward(loss)
            engine.step()
            loss_sum += loss.item()
        train_loss = mean_over_ranks(loss_sum, micro_steps, engine.device)
        val_mae = evaluate(engine, val_loader)
        if rank == 0:
            print(f"epoch {epoch} step {engine.global_steps} lr {scheduler.get_last_lr()[0]:.2e} "
                  f"train loss {train_loss:.4f} val mae {val_mae:.4f}", flush=True)
        engine.save_checkpoint(args.save_dir, tag=f"epoch{epoch + 1}", client_state={"epoch": epoch + 1})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
