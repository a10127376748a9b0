"""Denoising diffusion (DDPM) on tiny images, with an average of the weights (EMA) for validation and sampling."""
import argparse
import copy
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

SIZE, STEPS, BETAS = 8, 50, torch.linspace(1e-3, 0.15, 50)
SIGNAL = (1 - BETAS).cumprod(dim=0)


def make_images(n, seed):  # a bright spot somewhere on a dark ground
    x, y = torch.rand(2, n, 1, 1, generator=torch.Generator().manual_seed(seed)) * SIZE
    ys, xs = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    return (2 * torch.exp(-((xs - x) ** 2 + (ys - y) ** 2) / 4) - 1).unsqueeze(1)


class Denoiser(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.stem, self.head = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(depth))

    def forward(self, x, t):
        x, time = self.stem(x), self.time(t)[:, :, None, None]
        for block in self.blocks:  # activations are computed again in the backward
            x = x + checkpoint(block, x + time, use_reentrant=False)
        return self.head(x)


def noise_loss(model, images, noise, t, reduction="mean"):
    signal = SIGNAL.to(images.device)[t].view(-1, 1, 1, 1)
    noisy = signal.sqrt() * images + (1 - signal).sqrt() * noise
    return nn.functional.mse_loss(model(noisy, t), noise, reduction=reduction)


@torch.no_grad()
def update_ema(ema, net, decay):
    for average, p in zip(ema.parameters(), net.parameters()):
        average.lerp_(p, 1 - decay)


@torch.no_grad()
def validate(ema, images, noise, t):
    stats = torch.stack([noise_loss(ema, images, noise, t, reduction="sum"), torch.ones_like(images).sum()])
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


@torch.no_grad()
def sample(ema, n, device):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, SIZE, SIZE, generator=gen).to(device)
    for t in reversed(range(STEPS)):
        noise = ema(x, torch.full((n,), t, device=device))
        x = (x - BETAS[t] / (1 - SIGNAL[t]).sqrt() * noise) / (1 - BETAS[t]).sqrt()
        x += (t > 0) * BETAS[t].sqrt() * torch.randn(x.shape, generator=gen).to(device)
    return x


def save(state, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="of one backward in one process")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", default="checkpoints")
    args = parser.parse_args()
    local_rank, use_cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Denoiser().to(device)
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    model = DDP(torch.compile(net) if args.compile else net, device_ids=[local_rank] if use_cuda else None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    train, val_set = make_images(1024, seed=1), make_images(200, seed=2)
    loader = DataLoader(train, args.batch_size, sampler=DistributedSampler(train, drop_last=True), drop_last=True)
    val = val_set, torch.randn(val_set.shape), torch.randint(STEPS, (len(val_set),))
    val = [part[rank::world_size].to(device) for part in val]
    parts, start_epoch = {"model": net, "ema": ema, "optimizer": optimizer}, 0
    if os.path.exists(f"{args.output}/last.pt"):
        state = torch.load(f"{args.output}/last.pt", map_location=device)
        for key, part in parts.items():
            part.load_state_dict(state[key])
        start_epoch = state["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        loader.sampler.set_epoch(epoch)
        torch.manual_seed(1000 * (epoch + 1) + rank)  # noise of its own for each rank
        batches, total = iter(loader), torch.zeros((), device=device)
        for _ in range(len(loader) // args.accumulate):
            optimizer.zero_grad()
            for micro in range(args.accumulate):
                images, t = next(batches).to(device), torch.randint(STEPS, (args.batch_size,), device=device)
                with nullcontext() if micro == args.accumulate - 1 else model.no_sync():
                    loss = noise_loss(model, images, torch.randn_like(images), t) / args.accumulate
                    loss.backward()
                total += loss.detach()
            optimizer.step()
            update_ema(ema, net, decay=0.9)
        dist.all_reduce(total)
        val_loss = validate(ema, *val)
        if rank == 0:
            loss = total.item() / (len(loader) // args.accumulate * world_size)
            print(f"epoch {epoch}: loss {loss:.3f}, validation of the EMA {val_loss:.3f}", flush=True)
            save(sample(ema, 4, device).cpu(), f"{args.output}/samples_{epoch}.pt")
            state = {key: part.state_dict() for key, part in parts.items()}
            save({**state, "epoch": epoch}, f"{args.output}/last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
