"""Residual MLP whose hidden layers are split over the GPUs of one node (tensor parallelism without a library).

All processes work on the same batch. Start: torchrun --nproc-per-node=2 train.py
"""

import dataclasses
import math
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


@dataclasses.dataclass
class Hparams:
    d_in: int = 16
    d_model: int = 48
    d_hidden: int = 128
    n_blocks: int = 3
    dropout: float = 0.05
    batch: int = 64
    epochs: int = 6
    lr: float = 2e-3
    clip: float = 0.5
    seed: int = 11
    ckpt_dir: str = "ckpt"


class ToParallel(torch.autograd.Function):
    """Identity; the gradient is the sum over the ranks, since each rank uses the input in its own columns."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class FromParallel(torch.autograd.Function):
    """Sum over the ranks; identity for the gradient."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def shard(full, dim):
    """Own part of a matrix that was drawn with the same seed on all ranks; marked as sharded for the norm."""
    param = nn.Parameter(full.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())
    param.sharded = True
    return param


class ParallelBlock(nn.Module):
    """x + W2 gelu(W1 norm(x)): W1 split by its output, W2 by its input; one all-reduce each way."""

    def __init__(self, d, h, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.w1 = shard(torch.randn(h, d) / math.sqrt(d), 0)
        self.b1 = shard(torch.zeros(h), 0)
        self.w2 = shard(torch.randn(d, h) * 0.5 / math.sqrt(h), 1)
        self.b2 = nn.Parameter(torch.zeros(d))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = ToParallel.apply(self.norm(x))
        y = F.gelu(F.linear(y, self.w1, self.b1))
        y = FromParallel.apply(F.linear(y, self.w2)) + self.b2
        return x + self.dropout(y)


class Model(nn.Module):
    def __init__(self, hp):
        super().__init__()
        self.stem = nn.Linear(hp.d_in, hp.d_model)
        self.blocks = nn.Sequential(*[ParallelBlock(hp.d_model, hp.d_hidden, hp.dropout) for _ in range(hp.n_blocks)])
        self.head = nn.Sequential(nn.LayerNorm(hp.d_model), nn.Linear(hp.d_model, 1))

    def forward(self, x):
        return self.head(self.blocks(self.stem(x))).squeeze(-1)


@torch.no_grad()
def clip_gradients(model, max_norm):
    """Norm over all parameters: the replicated ones once, the sharded ones over all ranks."""
    own = torch.zeros(2, device=next(model.parameters()).device)
    for p in model.parameters():
        own[int(getattr(p, "sharded", False))] += p.grad.square().sum()
    dist.all_reduce(own[1:])
    norm = own.sum().sqrt()
    for p in model.parameters():
        p.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def make_data(n, hp, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, hp.d_in, generator=g)
    y = torch.sin(2 * x[:, 0]) * x[:, 1] + x[:, 2:6].square().sum(1).sqrt() - (x[:, 7] > 0).float() * x[:, 8]
    return x, y + 0.05 * torch.randn(n, generator=g)


def checkpoint_file(hp):
    return pathlib.Path(hp.ckpt_dir) / f"tp{dist.get_rank()}of{dist.get_world_size()}.pt"


def save(hp, model, opt, sched, epoch):
    file = checkpoint_file(hp)
    file.parent.mkdir(exist_ok=True)
    state = dict(model=model.state_dict(), opt=opt.state_dict(), sched=sched.state_dict(), epoch=epoch)
    torch.save(state, file)
    dist.barrier()


def load(hp, model, opt, sched, device):
    state = torch.load(checkpoint_file(hp), map_location=device)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    sched.load_state_dict(state["sched"])
    return state["epoch"] + 1


def main():
    hp = Hparams()
    resume = "--resume" in sys.argv
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    torch.manual_seed(hp.seed)  # same full matrices, same dropout masks on all ranks
    model = Model(hp).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=hp.lr, weight_decay=0.01)
    x, y = (t.to(device) for t in make_data(4096, hp, 1))
    x_val, y_val = (t.to(device) for t in make_data(1024, hp, 2))
    steps = len(x) // hp.batch
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, hp.epochs * steps, eta_min=hp.lr / 50)
    start = load(hp, model, opt, sched, device) if resume else 0

    for epoch in range(start, hp.epochs):
        torch.manual_seed(hp.seed + 100 * epoch)
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(hp.seed + epoch)).to(device)
        model.train()
        total = norm = 0.0
        for i in range(steps):
            idx = perm[i * hp.batch : (i + 1) * hp.batch]
            loss = F.smooth_l1_loss(model(x[idx]), y[idx])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            norm = clip_gradients(model, hp.clip)
            opt.step()
            sched.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            val = F.mse_loss(model(x_val), y_val).item()
        if dist.get_rank() == 0:
            print(f"[{epoch}] train {total / steps:.4f} val mse {val:.4f} grad norm {norm:.2f}", flush=True)
        save(hp, model, opt, sched, epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
