# FSDP2 pretraining of a toy decoder on a packed uint16 token file.  torchrun --nproc-per-node=2 train.py [key=value ...]
# Everything that decides where we are (data position, lr, epoch) follows from one number: the tokens seen so far.
import ast
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

cfg = dict(
    data_dir="data", out_dir="ckpt", resume=False, seed=1234,
    vocab=48, ctx=32, dim=48, heads=4, layers=2,
    train_tokens=60_000, val_tokens=6_000,
    batch=16,                       # sequences per rank
    max_tokens=100_000, warmup_tokens=10_000, lr=1e-2, min_lr=5e-4, weight_decay=0.1, clip=1.0,
    eval_every=40, save_every=40,   # optimizer steps
)
for item in sys.argv[1:]:
    key, value = item.split("=", 1)
    cfg[key] = value if isinstance(cfg[key], str) else ast.literal_eval(value)


def write_corpus(path, n_tokens, seed):
    """Documents from a sparse second-order chain, one after the other, token 0 between them."""
    rule = np.random.default_rng(0).integers(1, cfg["vocab"], (cfg["vocab"], 2, 4))
    rng = np.random.default_rng(seed)
    out = np.memmap(path + ".tmp", np.uint16, "w+", shape=(n_tokens,))
    u, ends = rng.integers(0, 4, n_tokens), rng.random(n_tokens) < 0.01
    a = b = 0
    for i in range(n_tokens):
        a, b = (0, 0) if ends[i] else (b, int(rule[b, a % 2, u[i]]))
        out[i] = b
    out.flush()
    os.replace(path + ".tmp", path)


class Decoder(nn.Module):
    def __init__(self, vocab, ctx, dim, heads, layers):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(ctx, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.tok(x) + self.pos.weight[:x.shape[1]]
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.head(self.norm(h))


class Packed:
    def __init__(self, path, ctx):
        self.tokens, self.ctx = np.memmap(path, np.uint16, "r"), ctx
        self.windows = (len(self.tokens) - 1) // ctx

    def batch(self, ids, device):
        rows = np.stack([self.tokens[i * self.ctx:(i + 1) * self.ctx + 1] for i in ids]).astype(np.int64)
        rows = torch.from_numpy(rows).to(device)
        return rows[:, :-1], rows[:, 1:]


def lr_at(tokens):
    if tokens < cfg["warmup_tokens"]:
        return cfg["lr"] * (tokens + 1) / cfg["warmup_tokens"]
    done = min(1.0, (tokens - cfg["warmup_tokens"]) / (cfg["max_tokens"] - cfg["warmup_tokens"]))
    return cfg["min_lr"] + 0.5 * (cfg["lr"] - cfg["min_lr"]) * (1 + math.cos(math.pi * done))


@torch.no_grad()
def perplexity(model, data, rank, world, device):
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    stride = cfg["batch"] * world
    for first in range(0, data.windows - stride + 1, stride):  # all ranks make equally many forward passes
        x, y = data.batch(range(first + rank, first + stride, world), device)
        total[0] += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        total[1] += y.numel()
    dist.all_reduce(total)
    model.train()
    return math.exp(total[0] / total[1])


def main():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    files = [os.path.join(cfg["data_dir"], name) for name in ("train.bin", "val.bin")]
    if rank == 0:
        os.makedirs(cfg["data_dir"], exist_ok=True)
        for seed, (path, n) in enumerate(zip(files, (cfg["train_tokens"], cfg["val_tokens"])), 1):
            os.path.exists(path) or write_corpus(path, n, seed)
    dist.barrier()
    train, val = (Packed(path, cfg["ctx"]) for path in files)

    torch.manual_seed(cfg["seed"])
    model = Decoder(cfg["vocab"], cfg["ctx"], cfg["dim"], cfg["heads"], cfg["layers"]).to(device)
    mesh = init_device_mesh(device.type, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.95), weight_decay=cfg["weight_decay"])

    tokens = 0
    latest = Path(cfg["out_dir"], "latest")
    if cfg["resume"]:
        path = Path(cfg["out_dir"], latest.read_text())
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state, "tokens": tokens}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        tokens = state["tokens"]

    rows = cfg["batch"] * world
    usable = train.windows // rows * rows  # the rest of an epoch is dropped, other windows each time
    while tokens < cfg["max_tokens"]:
        epoch, at = divmod(tokens // cfg["ctx"], usable)
        order = np.random.default_rng([cfg["seed"], epoch]).permutation(train.windows)
        x, y = train.batch(order[at:at + rows][rank::world], device)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(tokens)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg["clip"])
        optimizer.step()
        tokens += rows * cfg["ctx"]
        step, last = tokens // (rows * cfg["ctx"]), tokens >= cfg["max_tokens"]
        if last or step % cfg["eval_every"] == 0:
            ppl, norm = perplexity(model, val, rank, world, device), norm.full_tensor().item()
            mean = loss.detach()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} tokens {tokens} lr {optimizer.param_groups[0]['lr']:.2e} grad {norm:.2f} "
                      f"loss {mean.item() / world:.4f} val ppl {ppl:.3f}", flush=True)
        if last or step % cfg["save_every"] == 0:
            name, (model_state, optim_state) = f"step{step:06d}", get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optim": optim_state, "tokens": tokens},
                     checkpoint_id=Path(cfg["out_dir"], name))
            if rank == 0:
                latest.write_text(name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
