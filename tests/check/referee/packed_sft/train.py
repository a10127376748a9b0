"""Supervised fine-tuning on packed sequences: each GPU takes one pack of at most --budget tokens per step."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, SEP, IGNORE = 40, 0, -100


def make_examples(n, budget, seed):
    """(tokens, labels) of chats; only the answer, the prompt counted up by one, is a target."""
    rng, examples = random.Random(seed), []
    for i in range(n):
        start, length = rng.randrange(1, VOCAB), rng.randint(3, 40) if i % 25 else budget + rng.randint(0, 9)
        prompt = [(start + k) % (VOCAB - 1) + 1 for k in range(length)] + [SEP]
        answer = [t % (VOCAB - 1) + 1 for t in prompt[:rng.choice((2, length))] if t != SEP]
        examples.append(((prompt + answer)[:budget], ([IGNORE] * len(prompt) + answer)[:budget]))
    return examples


def make_packs(examples, budget, rng):
    """First fit over the examples in random order. All ranks call this with the same random state."""
    packs = []
    for example in rng.sample(examples, len(examples)):
        room = [p for p in packs[-8:] if sum(len(tokens) for tokens, _ in p) + len(example[0]) <= budget]
        if room:
            room[0].append(example)
        else:
            packs.append([example])
    return packs


def loss_and_count(model, pack):
    tokens = torch.tensor([t for example in pack for t in example[0]])
    labels = torch.tensor([t for example in pack for t in example[1][1:] + [IGNORE]])
    positions = torch.cat([torch.arange(len(example[0])) for example in pack])
    segments = torch.cat([torch.full((len(example[0]),), i) for i, example in enumerate(pack)])
    tokens, labels, positions, segments = [x[None].cuda() for x in (tokens, labels, positions, segments)]
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens, positions, segments)
    loss_sum = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss_sum, (labels != IGNORE).sum()


class Block(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class PackedLM(nn.Module):
    def __init__(self, budget, dim=48, depth=2):
        super().__init__()
        self.embed, self.pos, self.head = nn.Embedding(VOCAB, dim), nn.Embedding(budget, dim), nn.Linear(dim, VOCAB)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))

    def forward(self, tokens, positions, segments):
        mask = (segments[:, None] == segments[:, :, None]).tril()[:, None]  # causal, within one example
        x = self.embed(tokens) + self.pos(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--budget", type=int, default=96, help="tokens per pack")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--output", default="checkpoints/sft.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train_set = make_examples(150, args.budget, args.seed)
    train_set = [e for e in train_set if set(e[1]) != {IGNORE}]  # the answer of a long prompt may be cut off
    val_packs = make_packs(make_examples(40, args.budget, args.seed + 1), args.budget, random.Random(0))
    model = DDP(PackedLM(args.budget).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    os.makedirs(os.path.dirname(args.output) or ".", exist_ok=True)
    start_epoch = 0
    if args.resume and os.path.exists(args.output):
        state = torch.load(args.output, map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch = state["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        packs = make_packs(train_set, args.budget, random.Random(f"{args.seed}-{epoch}"))
        packs = packs[:len(packs) // world_size * world_size]
        for pack in packs[rank::world_size]:
            loss_sum, n_targets = loss_and_count(model, pack)
            total_targets = n_targets.clone()
            dist.all_reduce(total_targets)
            loss = loss_sum * world_size / total_targets  # DDP divides by the number of ranks
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        totals = torch.zeros(2, dtype=torch.float64).cuda()
        with torch.no_grad():
            for pack in val_packs[rank::world_size]:
                totals += torch.stack(loss_and_count(model.module, pack)).double()
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch}  packs {len(packs)}  val loss per token {totals[0] / totals[1]:.4f}", flush=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, args.output + ".tmp")
            os.replace(args.output + ".tmp", args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
