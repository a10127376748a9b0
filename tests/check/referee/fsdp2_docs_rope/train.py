"""Pretraining of a small rotary transformer with FSDP2: documents packed into rows of fixed length, attention only inside a document.

The corpus is one file of tokens, written once by rank 0. Step s takes the next --rows rows of it, of which each rank reads its part; the
position in the corpus is part of the checkpoint. A second start with the same arguments goes on from the newest checkpoint.

    torchrun --nproc-per-node=2 train.py
"""
import argparse
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCAB, END = 64, 0


def write_corpus(path, documents=3000, seed=4):
    """Documents of random length; each follows one of four tables of which token comes after which."""
    r = np.random.default_rng(seed)
    tables = [r.permutation(np.arange(1, VOCAB)) for _ in range(4)]
    out = []
    for _ in range(documents):
        table, token = tables[r.integers(4)], int(r.integers(1, VOCAB))
        for _ in range(int(r.integers(6, 60))):
            out.append(token)
            token = int(table[token - 1]) if r.random() < 0.9 else int(r.integers(1, VOCAB))
        out.append(END)
    np.asarray(out, dtype=np.uint16).tofile(path + ".tmp")
    os.replace(path + ".tmp", path)


class Rows:
    """Rows of length + 1 tokens (the last one is only a target), cut one after the other from the corpus; starts over at its end."""

    def __init__(self, path, length, first, last):
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.length, self.count = length, (len(tokens) - 1) // length
        self.first, self.size = int(first * self.count), int(last * self.count) - int(first * self.count)
        self.tokens = tokens

    def take(self, indices):
        starts = [(self.first + i % self.size) * self.length for i in indices]
        rows = torch.from_numpy(np.stack([self.tokens[s:s + self.length + 1] for s in starts]).astype(np.int64))
        x, y = rows[:, :-1], rows[:, 1:].clone()
        y[x == END] = -100  # the first token of a document cannot be foretold
        document = (x == END).cumsum(1) - (x == END).long()
        return x, y, document


def rotary(document, dim):
    """Cosine and sine of the positions, which count from the beginning of each document."""
    same = document[:, :, None] == document[:, None, :]
    position = torch.tril(same).sum(2) - 1
    angle = position[..., None] / 1000 ** (torch.arange(0, dim, 2, device=document.device) / dim)
    return angle.cos()[:, None], angle.sin()[:, None], torch.tril(same)[:, None]


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x, cos, sin, mask):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        h = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width=64, heads=4, layers=3):
        super().__init__()
        self.head_dim = width // heads
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.05)

    def forward(self, x, document):
        cos, sin, mask = rotary(document, self.head_dim)
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, cos, sin, mask)
        return self.head(self.norm(h)).float()


def token_loss(model, rows, indices, device):
    x, y, document = (t.to(device) for t in rows.take(indices))
    loss = F.cross_entropy(model(x, document).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
    return loss, (y != -100).sum()


@torch.no_grad()
def evaluate(model, rows, device, rank, world):
    """Loss per token over the validation rows. All ranks make the same number of forward passes; a pass too many counts nothing."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.double, device=device)
    for start in range(0, rows.size, 8 * world):
        indices = list(range(start + 8 * rank, min(start + 8 * rank + 8, rows.size)))
        loss, count = token_loss(model, rows, indices or [0], device)
        if indices:
            sums += torch.stack([loss.double(), count.double()])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def newest(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [int(n[5:]) for n in names if n.startswith("step_") and os.path.exists(os.path.join(folder, n, ".metadata"))]
    return max(steps, default=None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=24, help="rows per step over all ranks")
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--eval-every", type=int, default=15, help="an 'epoch': evaluation and checkpoint")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--out", default="out")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    corpus = os.path.join(args.out, "corpus.bin")
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        if not os.path.exists(corpus):
            write_corpus(corpus)
    dist.barrier()
    train_rows, val_rows = Rows(corpus, args.length, 0, 0.95), Rows(corpus, args.length, 0.95, 1)

    torch.manual_seed(2)
    model = Transformer().to(device)
    policy = MixedPrecisionPolicy() if args.fp32 else MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(device.type, (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    warmup = 6
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * s / args.steps))))

    first, row = 0, 0
    found = newest(args.out)
    if found is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": 0, "row": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.out, f"step_{found}"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first, row = state["step"], state["row"]

    share = args.rows // world
    for step in range(first, args.steps):
        mine = range(row + rank * share, row + (rank + 1) * share)
        loss, count = token_loss(model, train_rows, mine, device)
        total = count.clone()
        dist.all_reduce(total)
        (loss * world / total).backward()  # FSDP averages over ranks: sum of all losses / number of all targets
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        row += share * world

        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            value, norm, loss = evaluate(model, val_rows, device, rank, world), norm.full_tensor(), loss.detach()
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step + 1}: loss {loss / total:.4f}, validation {value:.4f}, perplexity {math.exp(value):.2f}, "
                      f"gradient norm {norm:.3f}, row {row}", flush=True)
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": step + 1, "row": row},
                     checkpoint_id=os.path.join(args.out, f"step_{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
