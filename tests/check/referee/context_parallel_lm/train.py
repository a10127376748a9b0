"""Language model with context parallelism, written by hand.

All ranks work on the same documents; each holds one stretch of every document. Keys and values are gathered over the ranks in every
layer, everything else stays local. The data are documents of a second-order Markov chain, padded at their end.

    torchrun --nproc-per-node=2 train.py

Continues from <out>/state.pt if there is one.
"""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, PAD = 16, 96, -100


def make_documents(n, seed):
    g = torch.Generator().manual_seed(4)
    chain = (2.5 * torch.randn(VOCAB, VOCAB, generator=g)[:, None] + 1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=g)).softmax(2)
    g = torch.Generator().manual_seed(seed)
    out = torch.randint(VOCAB, (n, LENGTH + 1), generator=g)
    for t in range(2, LENGTH + 1):
        out[:, t] = torch.multinomial(chain[out[:, t - 2], out[:, t - 1]], 1, generator=g)[:, 0]
    lengths = torch.randint(50, LENGTH + 2, (n, 1), generator=g)
    return out.masked_fill(torch.arange(LENGTH + 1) >= lengths, PAD)


class GatherSequence(torch.autograd.Function):
    """[batch, heads, local, dim] of every rank -> [batch, heads, length, dim]; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()].contiguous()


def rotate(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, None] * 0.05 ** (torch.arange(half, device=x.device) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x, positions):
        batch, local, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, local, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, positions), rotate(k, positions)
        k, v = GatherSequence.apply(torch.cat([k, v], 3)).chunk(2, 3)
        start = dist.get_rank() * local
        seen = torch.arange(k.shape[2], device=x.device) <= torch.arange(start, start + local, device=x.device)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, local, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self, width=48, heads=3, layers=2, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, x):
        local = x.shape[1]
        first = dist.get_rank() * local
        positions = torch.arange(first, first + local, device=x.device)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def my_stretch(documents, device):
    """Inputs and targets (the next tokens) of this rank's stretch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = documents[:, :-1].clamp(min=0), documents[:, 1:]
    return x.chunk(world, 1)[rank].to(device), y.chunk(world, 1)[rank].to(device)


@torch.no_grad()
def perplexity(model, documents, device):
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in documents.split(64):
        x, y = my_stretch(batch, device)
        total[0] += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
        total[1] += (y != PAD).sum()
    model.train()
    dist.all_reduce(total)
    return math.exp(total[0] / total[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="documents per step")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--ema", type=float, default=0.95)
    parser.add_argument("--out", default="out")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    assert LENGTH % world == 0, "every rank needs a stretch of the same length"

    train, test = make_documents(320, seed=1), make_documents(128, seed=2)
    torch.manual_seed(0)  # all ranks hold the same model
    model = Model(dropout=args.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    steps = len(train) // args.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps * args.epochs, pct_start=0.15)
    average = copy.deepcopy(model).requires_grad_(False)

    first, path = 0, os.path.join(args.out, "state.pt")
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["epochs"]

    for epoch in range(first, args.epochs):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))  # the same documents on all ranks
        torch.manual_seed(1000 * (epoch + 1) + rank)  # dropout differs: every rank has other tokens
        mean_loss = 0.0
        for i in range(steps):
            documents = train[order[i * args.batch:(i + 1) * args.batch]]
            x, y = my_stretch(documents, device)
            tokens = (documents[:, 1:] != PAD).sum().to(device)  # of all ranks
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum") / tokens
            optimizer.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.flatten() for p in model.parameters()] + [loss.detach().view(1)])
            dist.all_reduce(flat)
            at = 0
            for p in model.parameters():
                p.grad.copy_(flat[at:at + p.numel()].view_as(p))
                at += p.numel()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters()):
                    slow.lerp_(fast, 1 - args.ema)
            mean_loss += flat[-1].item() / steps
        value = perplexity(average, test, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean_loss:.4f}, perplexity of the averaged model {value:.4f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict(),
                        "schedule": schedule.state_dict(), "epochs": epoch + 1}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
