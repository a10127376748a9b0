"""Supervised fine-tuning of a small causal model on packed conversations; only the answers are learned."""
import argparse
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, IGNORE = 64, -100


def make_conversations(n, seed):
    """Prompts and answers; an answer goes on from the prompt's last word by a fixed rule, for as long as it likes."""
    rng, conversations = random.Random(seed), []
    for _ in range(n):
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(2, 12))]
        answer = [prompt[-1]]
        for _ in range(int(rng.expovariate(0.15)) % 30 + 1):
            answer.append((answer[-1] * 5 + 3) % (VOCAB - 2) + 2)
        conversations.append((prompt, answer[1:] + [1]))
    return conversations


def fill_packs(conversations, budget):
    packs, used = [], budget
    for prompt, answer in conversations:
        if used + len(prompt + answer) > budget:
            packs, used = [*packs, []], 0
        packs[-1].append((prompt, answer))
        used += len(prompt + answer)
    return packs


def packs_of_epoch(conversations, budget, epoch):
    """The same number of packs for each rank; the few left over at the end of the shuffled epoch are dropped."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shuffled = random.Random(epoch).sample(conversations, len(conversations))
    packs = fill_packs(shuffled, budget)
    return packs[rank:len(packs) // world_size * world_size:world_size]


def collate(pack, budget):
    """One row of words, their places, the number of their conversation, and targets (answers only)."""
    words, places, owner, targets = [], [], [], []
    for number, (prompt, answer) in enumerate(pack):
        words += prompt + answer
        places += range(len(prompt + answer))
        owner += [number] * len(prompt + answer)
        targets += [IGNORE] * (len(prompt) - 1) + answer + [IGNORE]
    rows = [(words, 0), (places, 0), (owner, -1), (targets, IGNORE)]
    return [torch.tensor([row + [fill] * (budget - len(row))]).cuda() for row, fill in rows]


class CausalLM(nn.Module):
    def __init__(self, dim=48, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.words, self.places = nn.Embedding(VOCAB, dim), nn.Embedding(64, dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, VOCAB))

    def forward(self, words, places, owner):
        x = self.words(words) + self.places(places)
        mask = (owner.unsqueeze(1) == owner.unsqueeze(2)).tril().unsqueeze(1)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)))


def summed_loss(model, words, places, owner, targets):
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        logits = model(words, places, owner)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss, (targets != IGNORE).sum()


@torch.no_grad()
def validate(lm, conversations, budget):
    stats = torch.zeros(2).cuda()  # loss, tokens
    for pack in fill_packs(conversations[dist.get_rank()::dist.get_world_size()], budget):
        stats += torch.stack(summed_loss(lm, *collate(pack, budget)))
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--budget", type=int, default=128, help="tokens of a pack, the batch of a process")
    parser.add_argument("--checkpoint", type=Path, default="checkpoints/sft.pt", help="goes on from it if it exists")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    lm = CausalLM().cuda()
    model = DDP(lm, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(lm.parameters(), lr=4e-3)
    train_set, val_set = make_conversations(400, seed=1), make_conversations(60, seed=2)
    start_epoch = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location="cpu")
        lm.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch = state["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        stats = torch.zeros(2).cuda()  # loss, tokens
        for pack in packs_of_epoch(train_set, args.budget, epoch):
            loss, tokens = summed_loss(model, *collate(pack, args.budget))
            total = torch.stack([loss.detach(), tokens])
            dist.all_reduce(total)
            optimizer.zero_grad()
            (loss * dist.get_world_size() / total[1]).backward()
            optimizer.step()
            stats += total
        val_loss = validate(lm, val_set, args.budget)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {(stats[0] / stats[1]).item():.3f}, validation {val_loss:.3f}", flush=True)
            args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": lm.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, args.checkpoint.with_suffix(".tmp"))
            os.replace(args.checkpoint.with_suffix(".tmp"), args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
