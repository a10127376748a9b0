"""Fit an image with a coordinate network (random Fourier features + MLP), float16 with loss scaling.

    torchrun --standalone --nproc_per_node=2 train_field.py --steps 200
"""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel


def painting(size):
    """An image with smooth and with busy regions, (size * size, 3) in [0, 1], and its coordinates in [-1, 1]."""
    axis = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    r = (x**2 + y**2).sqrt()
    red = 0.5 + 0.5 * torch.sin(9 * r)
    green = 0.5 + 0.5 * torch.sin(14 * x * (y > 0)) * torch.cos(11 * y)
    blue = (torch.exp(-6 * ((x - 0.3) ** 2 + (y + 0.4) ** 2)) + 0.3 * (y > 0.1)).clamp(0, 1)
    return torch.stack([x, y], -1).view(-1, 2), torch.stack([red, green, blue], -1).view(-1, 3)


class Field(nn.Module):
    def __init__(self, features=48, width=96, depth=3, sigma=3.0):
        super().__init__()
        self.register_buffer("freqs", sigma * torch.randn(2, features))
        dims = [2 * features] + [width] * depth
        layers = []
        for a, b in zip(dims, dims[1:]):
            layers += [nn.Linear(a, b), nn.ReLU(inplace=True)]
        self.mlp = nn.Sequential(*layers, nn.Linear(width, 3))

    def forward(self, coords):
        phase = 2 * math.pi * coords @ self.freqs
        return torch.sigmoid(self.mlp(torch.cat([phase.sin(), phase.cos()], -1)))


class Trainer:
    def __init__(self, args):
        self.args = args
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.kind = "cuda" if torch.cuda.is_available() else "cpu"
        if self.kind == "cuda":
            torch.cuda.set_device(self.local_rank)
        self.device = torch.device(self.kind, self.local_rank) if self.kind == "cuda" else torch.device("cpu")
        dist.init_process_group("nccl" if self.kind == "cuda" else "gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

        torch.manual_seed(args.seed)
        self.coords, self.colors = (t.to(self.device) for t in painting(args.size))
        ids = [self.local_rank] if self.kind == "cuda" else None
        self.model = DistributedDataParallel(Field().to(self.device), device_ids=ids)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr, eps=1e-7)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, args.lr, total_steps=args.steps, pct_start=0.1)
        self.scaler = GradScaler(self.kind, init_scale=2.0**14, growth_interval=200)
        self.step = 0
        if os.path.exists(args.ckpt):
            self.load()

    def load(self):
        state = torch.load(self.args.ckpt, map_location=self.device)
        self.model.module.load_state_dict(state["field"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]

    def save(self):
        if self.rank == 0:
            tmp = self.args.ckpt + ".part"
            torch.save(
                {
                    "field": self.model.module.state_dict(),
                    "opt": self.opt.state_dict(),
                    "sched": self.sched.state_dict(),
                    "scaler": self.scaler.state_dict(),
                    "step": self.step,
                },
                tmp,
            )
            os.replace(tmp, self.args.ckpt)
        dist.barrier()

    def batch(self):
        # seeded by the step, so that a resumed run draws what the first one would have drawn
        gen = torch.Generator().manual_seed(self.args.seed + 7919 * self.step + 104729 * (self.rank + 1))
        idx = torch.randint(len(self.coords), (self.args.rays,), generator=gen).to(self.device)
        jitter = torch.randn(self.args.rays, 2, generator=gen).to(self.device) / (8 * self.args.size)
        return self.coords[idx] + jitter, self.colors[idx]

    def train_step(self):
        coords, colors = self.batch()
        self.opt.zero_grad(set_to_none=True)
        with autocast(self.kind, dtype=torch.float16):
            pred = self.model(coords)
        loss = (pred.float() - colors).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        before = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        if self.scaler.get_scale() >= before:  # not after a skipped step
            self.sched.step()
        self.step += 1
        return loss.detach(), norm

    @torch.no_grad()
    def psnr(self):
        """PSNR of the whole image; each rank renders a strip of it."""
        strip = torch.arange(len(self.coords), device=self.device).tensor_split(self.world_size)[self.rank]
        err = torch.zeros(2, dtype=torch.float64, device=self.device)
        for idx in strip.split(4096):
            diff = self.model.module(self.coords[idx]) - self.colors[idx]
            err[0] += diff.square().sum()
            err[1] += diff.numel()
        dist.all_reduce(err)
        return -10 * torch.log10(err[0] / err[1])

    def fit(self):
        t0 = time.time()
        while self.step < self.args.steps:
            loss, norm = self.train_step()
            if self.step % self.args.log_every == 0:
                psnr = self.psnr()
                if self.rank == 0:
                    lr, scale = self.sched.get_last_lr()[0], self.scaler.get_scale()
                    print(
                        f"{self.step:5d} loss {loss:.5f} PSNR {psnr:.2f} dB lr {lr:.1e} scale {scale:.0f} "
                        f"norm {norm:.3f} ({time.time() - t0:.0f} s)",
                        flush=True,
                    )
                self.save()
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rays", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--clip", type=float, default=0.05)
    parser.add_argument("--log-every", type=int, default=40)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--ckpt", default="field.pt")
    Trainer(parser.parse_args()).fit()
