"""Pretrain a small decoder with fully_shard (FSDP2), bf16 compute and sharded checkpoints."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

VOCAB, CONTEXT, BATCH = 48, 32, 8


def make_rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(VOCAB, (count, CONTEXT + 1), generator=generator)
    jumps = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), rows.numel(), True, generator=generator).view_as(rows)
    for i in range(CONTEXT):
        rows[:, i + 1] = (5 * rows[:, i] + 7 * jumps[:, i] + 1) % VOCAB
    return rows


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, dim=64, depth=2, heads=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(CONTEXT, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def snapshot(model, optimizer, epoch):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "epoch": epoch}


def token_loss(model, rows, reduction="mean"):
    return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model, rows, rank, world, device):
    model.eval()
    sums = torch.zeros(2, device=device)
    for first in range(0, len(rows), BATCH * world):
        batch = rows[first + rank * BATCH:first + (rank + 1) * BATCH].to(device)
        loss = token_loss(model, batch if len(batch) else rows[:1].to(device), "sum")  # all ranks gather the shards
        if len(batch):
            sums += torch.stack([loss, torch.full_like(loss, batch[:, 1:].numel())])
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    rank, world = dist.get_rank(), dist.get_world_size()
    train_rows, val_rows = make_rows(256, seed=0), make_rows(44, seed=1)
    sampler = DistributedSampler(train_rows, seed=1, drop_last=True)
    loader = DataLoader(train_rows, BATCH, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = Decoder().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    start_epoch, latest = 0, args.out / "latest"
    if args.resume and latest.exists():
        state = snapshot(model, optimizer, 0)
        dcp.load(state, checkpoint_id=args.out / latest.read_text())
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start_epoch = state["epoch"]
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            loss = token_loss(model, batch.to(device))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                dist.all_reduce(mean := loss.detach() / world)
                if rank == 0:
                    print(f"epoch {epoch} step {step} loss {mean.item():.4f} grad norm {norm.item():.3f}")
        val_loss = evaluate(model, val_rows, rank, world, device)
        dcp.save(snapshot(model, optimizer, epoch + 1), checkpoint_id=args.out / f"epoch{epoch + 1}")
        if rank == 0:
            print(f"epoch {epoch} validation loss {val_loss:.4f}")
            (args.out / "latest.tmp").write_text(f"epoch{epoch + 1}")
            os.replace(args.out / "latest.tmp", latest)
    weights = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(weights, args.out / "weights.tmp")
        os.replace(args.out / "weights.tmp", args.out / "weights.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
