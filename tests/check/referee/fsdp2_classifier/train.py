"""A small transformer classifier, sharded with fully_shard (FSDP2), with mixed precision and distributed checkpoints.

Every start trains --epochs epochs, on top of those in the newest checkpoint that it finds in --out.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, LENGTH, CLASSES = 32, 24, 4


def make_data(n, seed):
    """Which of the tokens 0..3 occurs most often after the marker token 31?"""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (n,), generator=g)
    tokens = torch.randint(31, (n, LENGTH), generator=g)
    for c in range(3):
        at = (torch.rand(n, LENGTH - 1, generator=g) < 0.12).nonzero()
        tokens[at[:, 0], at[:, 1]] = 31
        lie = torch.rand(len(at), generator=g) < 0.2
        tokens[at[:, 0], at[:, 1] + 1] = torch.where(lie, torch.randint(CLASSES, (len(at),), generator=g), label[at[:, 0]])
    return TensorDataset(tokens, label)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self, dim=32, depth=2, heads=4):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, dim), nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, tokens):
        x = self.token(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1)).float()


class Progress(Stateful):
    """Everything that a checkpoint holds."""

    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched, self.epoch = model, opt, sched, -1

    def state_dict(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt, "sched": self.sched.state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.epoch = state["epoch"]


@torch.no_grad()
def accuracy(model, data, device, batch=128):
    """Every rank takes an equally long slice, so that all run the same number of (collective) forwards; what lies past the end is not counted."""
    model.eval()
    per_rank = math.ceil(len(data) / dist.get_world_size())
    counts = torch.zeros(2, device=device)
    for mine in (torch.arange(per_rank) + dist.get_rank() * per_rank).split(batch):
        valid = (mine < len(data)).to(device)
        tokens, label = (t.to(device) for t in data[mine.clamp(max=len(data) - 1)])
        right = model(tokens).argmax(-1) == label
        counts += torch.stack([(right & valid).sum(), valid.sum()])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=120, help="sequences per step over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=0.3)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    train, test = make_data(2400, seed=1), make_data(1001, seed=2)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler, drop_last=True, pin_memory=cuda)

    model = Classifier().to(device)
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 20) * 0.997 ** i)

    progress, latest = Progress(model, opt, sched), os.path.join(args.out, "latest")
    if os.path.exists(latest):
        with open(latest) as f:
            dcp.load({"progress": progress}, checkpoint_id=os.path.join(args.out, f.read()))

    first = progress.epoch + 1
    for epoch in range(first, first + args.epochs):
        sampler.set_epoch(epoch)
        total, largest = torch.zeros((), device=device), 0.0
        for tokens, label in loader:
            loss = F.cross_entropy(model(tokens.to(device)), label.to(device))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
            sched.step()
            total += loss.detach() / len(loader)
            largest = max(largest, norm.full_tensor().item())
        dist.all_reduce(total)
        score = accuracy(model, test, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / world:.4f}, largest gradient {largest:.2f}, accuracy {score:.4f}", flush=True)

        progress.epoch = epoch
        dcp.save({"progress": progress}, checkpoint_id=os.path.join(args.out, f"epoch-{epoch}"))
        if rank == 0:  # only now is the checkpoint complete
            with open(latest + ".tmp", "w") as f:
                f.write(f"epoch-{epoch}")
            os.replace(latest + ".tmp", latest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
