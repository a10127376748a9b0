"""A small language model from scratch on made-up stories: FSDP2 in bf16, clipping, warm-up and cosine, DCP checkpoints, perplexity and a sample per epoch.

torchrun --nproc-per-node=2 train.py; the same command goes on from the newest checkpoint in --out.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCAB, LENGTH = 64, 32


def make_stories(n, seed):
    """Each story has a hero, a place and a thing (early tokens); sentences name them again and follow fixed transitions, with some noise."""
    g = torch.Generator().manual_seed(seed)
    jump = torch.randint(16, VOCAB, (VOCAB, 2), generator=torch.Generator().manual_seed(0))
    story = torch.empty(n, LENGTH + 1, dtype=torch.long)
    story[:, :3] = torch.randint(4, 16, (n, 3), generator=g)
    story[:, 3] = 16 + story[:, :3].sum(1)
    for t in range(4, LENGTH + 1):
        following = jump[story[:, t - 1]].gather(1, torch.randint(0, 2, (n, 1), generator=g)).squeeze(1)
        story[:, t] = story[:, (t // 6) % 3] if t % 6 == 0 else following
    return story


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Writer(nn.Module):
    def __init__(self, width=96, depth=3, heads=4):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        for p in (self.token.weight, self.place.weight):
            nn.init.normal_(p, std=0.02)

    def forward(self, x):
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)).float()


@torch.no_grad()
def perplexity(model, stories, batch, rank, world, device):
    """Over all stories; every rank calls the model equally often, because each call gathers the shards."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for at in range(0, len(stories), batch * world):
        part = stories[at + rank * batch:at + (rank + 1) * batch]
        there = len(part)
        part = (part if there else stories[:1]).to(device)
        losses = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        if there:
            sums += torch.stack([losses.double().sum(), torch.tensor(float(losses.numel()), dtype=torch.float64, device=device)])
    dist.all_reduce(sums)
    model.train()
    return math.exp(sums[0].item() / sums[1].item())


@torch.no_grad()
def write(model, start, n=20):
    model.eval()
    text = start[None]
    for _ in range(n):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    model.train()
    return text[0].tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=48, help="stories per step over all ranks")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (world,))

    train, valid = make_stories(816, 1), make_stories(171, 2)
    model = Writer().to(device)
    policy = MixedPrecisionPolicy() if args.fp32 else MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    per_epoch = len(train) // args.batch
    total = per_epoch * args.epochs

    def rate(step):
        if step < args.warmup:
            return args.lr * (step + 1) / args.warmup
        return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - args.warmup) / (total - args.warmup))))

    latest, step = os.path.join(args.out, "latest"), 0
    if os.path.exists(latest):
        with open(latest) as f:
            step = int(f.read())
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=os.path.join(args.out, f"step_{step}"))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        if rank == 0:
            print(f"goes on at step {step}", flush=True)

    while step < total:
        epoch, done = divmod(step, per_epoch)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1000 + epoch))
        for i in range(done, per_epoch):
            mine = order[i * args.batch:(i + 1) * args.batch][rank::world]
            stories = train[mine].to(device)
            loss = F.cross_entropy(model(stories[:, :-1]).flatten(0, 1), stories[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
            step += 1
            if step % 5 == 0:
                norm, mean = norm.full_tensor(), loss.detach().clone()
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"step {step} loss {mean.item() / world:.4f} norm {norm.item():.4f}", flush=True)
            if step % args.save_every == 0 or step == total:
                weights, moments = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=os.path.join(args.out, f"step_{step}"))
                if rank == 0:  # dcp.save returns when all ranks have written
                    with open(latest + ".tmp", "w") as f:
                        f.write(str(step))
                    os.replace(latest + ".tmp", latest)
        value = perplexity(model, valid, 8, rank, world, device)
        text = write(model, valid[0, :6].to(device))
        if rank == 0:
            print(f"epoch {epoch} perplexity {value:.4f} sample {text}", flush=True)
    value = perplexity(model, valid, 8, rank, world, device)
    if rank == 0:
        print(f"finished at step {step}, perplexity {value:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
