"""Fine-tune a small vision transformer with FSDP2 (fully_shard) and sharded (DCP) checkpoints."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shapes(Dataset):
    """16x16 images of oriented bars under noise: 6 classes, one for each orientation."""

    def __init__(self, size, seed, train):
        gen = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 6, (size,), generator=gen)
        angle = self.labels * torch.pi / 6
        yy, xx = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
        shift = torch.rand(size, 1, 1, generator=gen) - 0.5
        dist_ = angle.cos()[:, None, None] * xx + angle.sin()[:, None, None] * yy - shift
        self.images = torch.exp(-20 * dist_ ** 2) + 0.3 * torch.randn(size, 16, 16, generator=gen)
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        # random shift by up to two pixels in training
        shift = torch.randint(-2, 3, (2,)).tolist() if self.train else [0, 0]
        return self.images[i].roll(shift, dims=(0, 1)), self.labels[i], i


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim=64, depth=3, heads=4, classes=6):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 16, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x[:, None]).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    hits = torch.zeros(len(loader.dataset), device=device)
    for x, y, i in loader:  # the sampler repeats samples at the end: count each index once
        hits[i.to(device)] = (model(x.to(device)).argmax(-1) == y.to(device)).float()
    model.train()
    dist.all_reduce(hits, op=dist.ReduceOp.MAX)
    return hits.mean().item()


def checkpoint_state(model, opt, sched, epoch, rank, use_cuda):
    model_sd, opt_sd = get_state_dict(model, opt)
    state = {"model": model_sd, "opt": opt_sd, "sched": sched.state_dict(), "epoch": epoch,
             f"rng_{rank}": torch.get_rng_state()}
    return state | ({f"cuda_rng_{rank}": torch.cuda.get_rng_state()} if use_cuda else {})


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--pretrained", default=None, help="state dict of a backbone")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--out", default="checkpoints")
    args = p.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(0)
    model = ViT().to(device)
    weights = {}
    if rank == 0:  # only rank 0 reads the pretrained file
        weights = torch.load(args.pretrained, map_location=device) if args.pretrained else model.state_dict()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    train_set, test_set = Shapes(1024, seed=1, train=True), Shapes(301, seed=2, train=False)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, shuffle=False))

    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(train_loader))
    torch.manual_seed(100 + rank)  # augmentation and dropout differ between ranks

    start = max((e for e in range(1, args.epochs + 1) if os.path.exists(f"{args.out}/epoch{e}/.metadata")), default=0)
    if start:
        state = checkpoint_state(model, opt, sched, start, rank, use_cuda)
        dcp.load(state, checkpoint_id=f"{args.out}/epoch{start}")
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])
        torch.set_rng_state(state[f"rng_{rank}"])
        if use_cuda:
            torch.cuda.set_rng_state(state[f"cuda_rng_{rank}"])

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        running = 0.0
        for x, y, _ in train_loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device), label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            running += loss.detach() / len(train_loader)
        dist.all_reduce(running)
        acc = evaluate(model, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch + 1} loss {running.item() / world:.4f} accuracy {acc:.4f}", flush=True)
        dcp.save(checkpoint_state(model, opt, sched, epoch + 1, rank, use_cuda),
                 checkpoint_id=f"{args.out}/epoch{epoch + 1}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
