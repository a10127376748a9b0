"""DDPM on tiny images with EMA weights, gradient accumulation and gradient checkpointing."""
import argparse
import contextlib
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

T, BETAS = 50, torch.linspace(1e-3, 0.12, 50)
ALPHA_BARS = torch.cumprod(1 - BETAS, dim=0)


def make_images(n, seed, size=8):
    center = 1 + (size - 3) * torch.rand(n, 2, 1, generator=torch.Generator().manual_seed(seed))
    axis = (torch.arange(size) - center) ** 2
    return 2 * torch.exp(-(axis[:, 0, :, None] + axis[:, 1, None]) / 3)[:, None] - 1


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.time = nn.Linear(16, width)
        self.net = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x, emb):
        return x + self.net(x + self.time(emb)[:, :, None, None])


class Denoiser(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x, t):
        angles = t[:, None] / T * 2.0 ** torch.arange(8, device=x.device)
        emb = torch.cat([angles.sin(), angles.cos()], dim=1)
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, emb, use_reentrant=False)
        return self.last(x)


def diffusion_loss(model, images, generator):
    t = torch.randint(T, (len(images),), generator=generator, device=images.device)
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    alpha_bar = ALPHA_BARS.to(images.device)[t][:, None, None, None]
    return F.mse_loss(model(alpha_bar.sqrt() * images + (1 - alpha_bar).sqrt() * noise, t), noise)


@torch.no_grad()
def sample(model, device, n=8):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(n, 1, 8, 8, generator=g, device=device)
    for t in reversed(range(T)):
        eps = model(x, torch.full((n,), t, device=device))
        x = (x - BETAS[t] / (1 - ALPHA_BARS[t]).sqrt() * eps) / (1 - BETAS[t]).sqrt()
        x += (t > 0) * BETAS[t].sqrt() * torch.randn(x.shape, generator=g, device=device)
    return x.clamp(-1, 1).cpu()


def save(data, path):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    torch.save(data, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="per process and forward pass")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--ema", type=float, default=0.95)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    train_images, val_images = make_images(512, seed=1), make_images(96, seed=2)[rank::world_size].to(device)
    sampler = DistributedSampler(train_images, drop_last=True)
    loader = DataLoader(train_images, args.batch_size, sampler=sampler, drop_last=True)
    net = Denoiser().to(device)
    model = DDP(torch.compile(net) if args.compile else net, device_ids=[device.index] if use_cuda else None)
    ema = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    parts = {"net": net, "ema": ema, "optimizer": optimizer}
    path, start_epoch = os.path.join(args.out, "last.pt"), 0
    if args.resume and os.path.exists(path):
        state = torch.load(path, map_location="cpu")
        for name, x in parts.items():
            x.load_state_dict(state[name])
        start_epoch = state["epoch"] + 1
    usable = len(loader) // args.accum * args.accum
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        generator = torch.Generator(device).manual_seed(1000 * (epoch + 1) + rank)
        for i, images in zip(range(usable), loader):
            last_of_group = (i + 1) % args.accum == 0
            with contextlib.nullcontext() if last_of_group else model.no_sync():
                (diffusion_loss(model, images.to(device), generator) / args.accum).backward()
            if last_of_group:
                optimizer.step()
                optimizer.zero_grad()
                for e, p in zip(ema.parameters(), net.parameters()):
                    e.lerp_(p.detach(), 1 - args.ema)
        with torch.no_grad():
            val_loss = diffusion_loss(ema, val_images, torch.Generator(device).manual_seed(rank))
        totals = torch.stack([val_loss * len(val_images), val_loss.new_tensor(len(val_images))])
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch}  validation loss of the EMA {totals[0] / totals[1]:.4f}", flush=True)
            save(sample(ema, device), os.path.join(args.out, "samples.pt"))
            save({"epoch": epoch, **{name: x.state_dict() for name, x in parts.items()}}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
