"""ZeRO stage 1 in 60 lines: bf16 weights on every rank, fp32 weights and Adam moments split over the ranks.

    torchrun --nproc-per-node=2 train.py [--resume]
"""
import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, CONTEXT = 32, 6


class ShardedAdamW:
    """Every rank updates its part of one long fp32 vector, then all parts are gathered into the bf16 weights."""

    def __init__(self, params, lr, weight_decay=0.01, max_norm=1.0):
        self.params, self.max_norm = list(params), max_norm
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.sizes = [p.numel() for p in self.params]
        self.part = -(-sum(self.sizes) // self.world_size)  # the last part is filled up with zeros
        self.master = self.flatten(self.params).view(self.world_size, -1)[self.rank].clone()
        self.gradient = torch.zeros_like(self.master)
        self.adam = torch.optim.AdamW([self.master], lr=lr, weight_decay=weight_decay, betas=(0.9, 0.98))

    def flatten(self, tensors):
        flat = torch.cat([t.detach().float().flatten() for t in tensors])
        return F.pad(flat, (0, self.part * self.world_size - len(flat)))

    def collect_gradients(self):
        """Call it after each backward: adds the ranks' mean gradient to this rank's part, and frees the bf16 ones."""
        flat = self.flatten([p.grad for p in self.params])
        mine = torch.empty_like(self.gradient)
        dist.reduce_scatter_tensor(mine, flat)
        self.gradient += mine / self.world_size
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        square = self.gradient.square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        self.master.grad = self.gradient * (self.max_norm / norm).clamp(max=1.0)
        self.adam.step()
        self.gradient.zero_()
        self.publish()
        return norm.item()

    @torch.no_grad()
    def publish(self):
        flat = self.master.new_empty(self.part * self.world_size)
        dist.all_gather_into_tensor(flat, self.master)
        for p, values in zip(self.params, flat[:sum(self.sizes)].split(self.sizes)):
            p.copy_(values.view_as(p))

    def state_dict(self):
        return {"master": self.master, "adam": self.adam.state_dict()}

    def load_state_dict(self, state):
        self.master.copy_(state["master"])
        self.adam.load_state_dict(state["adam"])


class NextWord(nn.Module):
    """The neural language model of Bengio et al. (2003)."""

    def __init__(self, dim=24, hidden=128):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mlp = nn.Sequential(nn.Linear(CONTEXT * dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(),
                                 nn.Linear(hidden, VOCAB))

    def forward(self, context):
        return self.mlp(self.embed(context).flatten(1)).float()


def make_windows(n, seed):
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB, (n + CONTEXT,), generator=g)
    surprise = torch.rand(len(text), generator=g) < 0.2
    for i in range(2, len(text)):
        if not surprise[i]:
            text[i] = (5 * text[i - 1] + 7 * (text[i - 2] % 2) + 3) % VOCAB
    windows = text.unfold(0, CONTEXT + 1, 1)
    return windows[:, :-1], windows[:, -1]


@torch.no_grad()
def evaluate(model, contexts, targets, rank, world_size):
    own = slice(rank, None, world_size)
    loss = F.cross_entropy(model(contexts[own]), targets[own], reduction="sum")
    dist.all_reduce(loss)
    return loss.item() / len(targets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    use_cuda, local_rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    contexts, targets = (t.to(device) for t in make_windows(8192, 1))
    val_contexts, val_targets = (t.to(device) for t in make_windows(1001, 2))
    torch.manual_seed(args.seed)  # all ranks begin with the same weights
    model = NextWord().to(device, torch.bfloat16)
    optimizer = ShardedAdamW(model.parameters(), lr=args.lr)
    first_epoch, latest = 0, args.dir / "latest"
    if args.resume and latest.exists():
        folder = args.dir / latest.read_text()
        model.load_state_dict(torch.load(folder / "model.pt", map_location=device))
        optimizer.load_state_dict(torch.load(folder / f"optimizer-{rank}-of-{world_size}.pt", map_location=device))
        first_epoch = int(folder.name.removeprefix("epoch")) + 1

    step_size = world_size * args.accumulate * args.micro_batch
    steps = len(targets) // step_size
    for epoch in range(first_epoch, args.epochs):
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(args.seed + epoch))
        order = order[:steps * step_size].view(steps, world_size, args.accumulate, args.micro_batch)
        total = torch.zeros((), device=device)
        for step in range(steps):
            done = epoch * steps + step
            cosine = 0.55 + 0.45 * math.cos(math.pi * done / (args.epochs * steps))
            for group in optimizer.adam.param_groups:
                group["lr"] = args.lr * min((done + 1) / 20, cosine)
            for picked in order[step, rank].to(device):
                loss = F.cross_entropy(model(contexts[picked]), targets[picked])
                (loss / args.accumulate).backward()
                optimizer.collect_gradients()
                total += loss.detach()
            norm = optimizer.step()
        dist.all_reduce(total)
        val_loss = evaluate(model, val_contexts, val_targets, rank, world_size)

        folder = args.dir / f"epoch{epoch}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(optimizer.state_dict(), folder / f"optimizer-{rank}-of-{world_size}.pt")
        if rank == 0:
            torch.save(model.state_dict(), folder / "model.pt")
            print(f"epoch {epoch}: loss {total.item() / (steps * args.accumulate * world_size):.4f}, "
                  f"validation {val_loss:.4f}, gradient norm {norm:.2f}", flush=True)
        dist.barrier()  # all parts are there before the folder is called the latest
        if rank == 0:
            (args.dir / "latest.tmp").write_text(folder.name)
            os.replace(args.dir / "latest.tmp", latest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
