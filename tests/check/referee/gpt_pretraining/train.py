"""Pretrain a tiny GPT on a file of tokens:  torchrun --nproc-per-node=2 train.py [--max_iters 200] [--resume 1]"""
import argparse
import dataclasses
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclasses.dataclass
class Config:
    out_dir: str = "run"
    vocab_size: int = 64
    block_size: int = 32
    batch_size: int = 8  # sequences per GPU and micro-step
    grad_accum: int = 2
    max_iters: int = 40
    warmup_iters: int = 5
    eval_interval: int = 10
    lr: float = 6e-3
    seed: int = 1337
    resume: int = 0  # 1: go on from the checkpoint in out_dir


class GPT(nn.Module):
    def __init__(self, cfg, n_embd=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(cfg.vocab_size, n_embd), nn.Embedding(cfg.block_size, n_embd)
        block = nn.TransformerEncoderLayer(n_embd, 2, 4 * n_embd, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(n_embd), enable_nested_tensor=False)
        self.head = nn.Linear(n_embd, cfg.vocab_size, bias=False)

    def forward(self, idx, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1), device=idx.device)
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        return F.cross_entropy(self.head(self.blocks(x, mask, is_causal=True)).flatten(0, 1), targets.flatten())


def prepare_data(cfg, path, length=24_000):
    os.makedirs(cfg.out_dir, exist_ok=True)
    rng = np.random.default_rng(0)
    successor = rng.permutation(cfg.vocab_size)  # follows its token nine times out of ten
    tokens = rng.integers(cfg.vocab_size, size=length).astype(np.uint16)
    for i in np.flatnonzero(rng.random(length - 1) < 0.9):
        tokens[i + 1] = successor[tokens[i]]
    tokens.tofile(path + ".tmp")
    os.replace(path + ".tmp", path)


def load_batch(data, starts, cfg, device):
    rows = torch.from_numpy(np.stack([data[s:s + cfg.block_size + 1] for s in starts]).astype(np.int64)).to(device)
    return rows[:, :-1], rows[:, 1:]


def lr_at(it, cfg):
    decay = max(0, it - cfg.warmup_iters) / (cfg.max_iters - cfg.warmup_iters)
    return cfg.lr * min((it + 1) / cfg.warmup_iters, 0.55 + 0.45 * math.cos(math.pi * decay))


@torch.no_grad()
def evaluate(net, data, cfg, device):
    starts = np.arange(0, len(data) - cfg.block_size, cfg.block_size)[dist.get_rank()::dist.get_world_size()]
    total = torch.zeros(2, device=device)  # sum of the losses, number of windows
    for chunk in np.array_split(starts, math.ceil(len(starts) / cfg.batch_size)):
        with torch.amp.autocast("cuda", dtype=torch.bfloat16):
            loss = net(*load_batch(data, chunk, cfg, device)).float()
        total += torch.stack([loss, torch.ones_like(loss)]) * len(chunk)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def train(cfg):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    data_path, ckpt_path = os.path.join(cfg.out_dir, "tokens.bin"), os.path.join(cfg.out_dir, "ckpt.pt")
    if rank == 0:
        prepare_data(cfg, data_path)
    dist.barrier()
    tokens = np.memmap(data_path, dtype=np.uint16, mode="r")
    train_data, val_data = tokens[:-len(tokens) // 8], tokens[-len(tokens) // 8:]
    torch.manual_seed(cfg.seed)
    net = GPT(cfg).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.1)
    first_iter = 0
    if cfg.resume:
        ckpt = torch.load(ckpt_path, map_location=device, weights_only=True)
        net.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        first_iter = ckpt["iter"]
    model = DDP(net, device_ids=[local_rank])
    for it in range(first_iter, cfg.max_iters):
        rng = np.random.default_rng([cfg.seed, rank, it])
        optimizer.param_groups[0]["lr"] = lr_at(it, cfg)
        model.train()
        mean_loss = torch.zeros((), device=device)
        for micro_step in range(cfg.grad_accum):
            starts = rng.integers(len(train_data) - cfg.block_size, size=cfg.batch_size)
            x, y = load_batch(train_data, starts, cfg, device)
            model.require_backward_grad_sync = micro_step == cfg.grad_accum - 1
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x, y) / cfg.grad_accum
            loss.backward()
            mean_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (it + 1) % cfg.eval_interval == 0 or it + 1 == cfg.max_iters:
            val_loss = evaluate(net.eval(), val_data, cfg, device)
            dist.all_reduce(mean_loss)
            if rank == 0:
                print(f"iter {it + 1}: train {mean_loss / world_size:.4f}, val {val_loss:.4f}", flush=True)
                ckpt = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "iter": it + 1}
                torch.save(ckpt, ckpt_path + ".tmp")
                os.replace(ckpt_path + ".tmp", ckpt_path)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Config):
        parser.add_argument("--" + field.name, type=field.type, default=field.default)
    train(Config(**vars(parser.parse_args())))
