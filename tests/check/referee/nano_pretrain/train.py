"""Pretrain a tiny GPT on made-up text, character by character.

One process:    python train.py
More of them:   torchrun --nproc-per-node=2 train.py

The batch of one optimizer step is batch_size * grad_accum sequences, however many processes share it.
Started again, the run goes on from out_dir/ckpt.pt by itself.
"""
import argparse
import math
import os
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from model import GPT, GPTConfig


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out_dir", default="out")
    parser.add_argument("--max_iters", type=int, default=40)
    parser.add_argument("--warmup_iters", type=int, default=4)
    parser.add_argument("--eval_interval", type=int, default=10)
    parser.add_argument("--eval_iters", type=int, default=6, help="batches per process and split")
    parser.add_argument("--log_interval", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=8, help="sequences per micro-step")
    parser.add_argument("--grad_accum", type=int, default=6, help="micro-steps per iteration over all processes")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--min_lr", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1337)
    return parser.parse_args()


def make_corpus(n_words=8000, seed=0):
    """Words of a small invented lexicon, the frequent ones first as in Zipf's law; 0 is the space."""
    rng = np.random.default_rng(seed)
    lexicon = [np.append(rng.integers(1, 27, rng.integers(2, 7)), 0) for _ in range(50)]
    frequency = 1 / np.arange(1, len(lexicon) + 1)
    words = rng.choice(len(lexicon), n_words, p=frequency / frequency.sum())
    tokens = np.concatenate([lexicon[w] for w in words])
    cut = int(0.9 * len(tokens))
    return {"train": torch.from_numpy(tokens[:cut]), "val": torch.from_numpy(tokens[cut:])}


def get_batch(data, batch_size, block_size, generator, device):
    ix = torch.randint(len(data) - block_size, (batch_size,), generator=generator).tolist()
    x = torch.stack([data[i:i + block_size] for i in ix])
    y = torch.stack([data[i + 1:i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


def get_lr(it, args):
    if it < args.warmup_iters:
        return args.learning_rate * (it + 1) / (args.warmup_iters + 1)
    progress = (it - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    return args.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (args.learning_rate - args.min_lr)


def get_random_state(generator):
    return {"data": generator.get_state(), "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None}


def set_random_state(state, generator):
    generator.set_state(state["data"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def main():
    args = get_args()
    ddp = "RANK" in os.environ
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, use_cuda = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if ddp:
        dist.init_process_group("nccl" if use_cuda else "gloo")
    assert args.grad_accum % world_size == 0, "grad_accum must be a multiple of the number of processes"
    accum_steps = args.grad_accum // world_size
    autocast = torch.autocast("cuda", dtype=torch.bfloat16) if use_cuda else nullcontext()

    data = make_corpus()
    torch.manual_seed(args.seed)
    config = GPTConfig()
    raw_model = GPT(config).to(device)
    optimizer = raw_model.configure_optimizer(args.weight_decay, args.learning_rate, betas=(0.9, 0.95))
    torch.manual_seed(args.seed + rank)  # dropout
    generator = torch.Generator().manual_seed(args.seed + rank)  # offsets of the training batches
    iter_num, best_val_loss = 0, math.inf

    ckpt_path = os.path.join(args.out_dir, "ckpt.pt")
    if os.path.exists(ckpt_path):
        checkpoint = torch.load(ckpt_path, map_location="cpu", weights_only=True)
        raw_model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
        if len(checkpoint["random_states"]) == world_size:
            set_random_state(checkpoint["random_states"][rank], generator)
        else:  # another number of processes: go on with numbers not drawn before
            torch.manual_seed(args.seed + 1000 * iter_num + rank)
            generator.manual_seed(args.seed + 1000 * iter_num + rank)
        if rank == 0:
            print(f"resuming from iteration {iter_num}", flush=True)

    model = DDP(raw_model, device_ids=[local_rank] if use_cuda else None) if ddp else raw_model

    def average(value):
        if ddp:
            dist.all_reduce(value)
        return (value / world_size).item()

    @torch.no_grad()
    def estimate_loss():
        raw_model.eval()
        losses = {}
        for split in ["train", "val"]:
            fixed = torch.Generator().manual_seed(args.seed + rank)  # the same batches at every estimate
            total = torch.zeros((), device=device)
            for _ in range(args.eval_iters):
                x, y = get_batch(data[split], args.batch_size, config.block_size, fixed, device)
                with autocast:
                    total += raw_model(x, y)[1] / args.eval_iters
            losses[split] = average(total)
        raw_model.train()
        return losses

    def save_checkpoint(name):
        random_states = [get_random_state(generator)]
        if ddp:
            random_states = [None] * world_size
            dist.all_gather_object(random_states, get_random_state(generator))
        if rank == 0:
            os.makedirs(args.out_dir, exist_ok=True)
            path = os.path.join(args.out_dir, name)
            torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num,
                        "best_val_loss": best_val_loss, "random_states": random_states, "args": vars(args)},
                       path + ".tmp")
            os.replace(path + ".tmp", path)

    while iter_num < args.max_iters:
        lr = get_lr(iter_num, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        train_loss = torch.zeros((), device=device)
        for micro_step in range(accum_steps):
            if ddp:  # gradients are exchanged once, with the last micro-step
                model.require_backward_grad_sync = micro_step == accum_steps - 1
            x, y = get_batch(data["train"], args.batch_size, config.block_size, generator, device)
            with autocast:
                loss = model(x, y)[1] / accum_steps
            loss.backward()
            train_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(raw_model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1

        if iter_num % args.log_interval == 0:
            train_loss = average(train_loss)
            if rank == 0:
                print(f"iter {iter_num}: loss {train_loss:.4f}, lr {lr:.2e}", flush=True)
        if iter_num % args.eval_interval == 0 or iter_num == args.max_iters:
            losses = estimate_loss()
            is_best, best_val_loss = losses["val"] < best_val_loss, min(losses["val"], best_val_loss)
            if rank == 0:
                print(f"iter {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
            for name in ["best.pt", "ckpt.pt"] if is_best else ["ckpt.pt"]:
                save_checkpoint(name)
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
