"""Train a byte-pair tokenizer and then a small GRU language model with it, on a made-up language.

Every rank has its own part of the lines. Usage: torchrun --nproc-per-node=2 lm.py --epochs 4
"""
import argparse
import collections
import math
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


# ---------------------------------------------------------------- text
def make_lines(n, seed):
    """Sentences of a language with stems, endings and agreement between noun and verb."""
    lexicon = random.Random(4)
    syllables = [c + v for c in "bdgklmnprst" for v in "aeiou"]
    stems = lambda k: ["".join(lexicon.sample(syllables, lexicon.choice([2, 2, 3]))) for _ in range(k)]
    nouns, verbs, adjectives = stems(30), stems(20), stems(14)
    rng = random.Random(seed)
    pick = lambda words: words[min(int(rng.expovariate(0.15)), len(words) - 1)]
    lines = []
    for _ in range(n):
        phrases = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            plural = rng.random() < 0.4
            words = [pick(adjectives) + ("ish" if plural else "o")] if rng.random() < 0.5 else []
            words += [pick(nouns) + ("en" if plural else ""), pick(verbs) + ("ont" if plural else "et")]
            phrases.append(" ".join(words))
        lines.append(" , ".join(phrases) + " .")
    return lines


# ---------------------------------------------------------------- tokenizer
def join_pair(symbols, pair):
    out, i = [], 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            out.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            out.append(symbols[i])
            i += 1
    return tuple(out)


def train_bpe(lines, vocab_size):
    """Merges by frequency; returns the alphabet and the merges in order."""
    words = collections.Counter(w + "_" for line in lines for w in line.split())
    table = {tuple(w): n for w, n in words.items()}
    alphabet = sorted({c for w in table for c in w})
    merges = []
    while len(alphabet) + len(merges) < vocab_size:
        pairs = collections.Counter()
        for w, n in table.items():
            for pair in zip(w, w[1:]):
                pairs[pair] += n
        if not pairs:
            break
        best = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(best)
        table = {join_pair(w, best): n for w, n in table.items()}
    return alphabet, merges


class Tokenizer:
    def __init__(self, alphabet, merges):
        self.merges = merges
        self.ids = {s: i for i, s in enumerate(["<eos>"] + alphabet + [a + b for a, b in merges])}
        self.cache = {}

    def word(self, w):
        if w not in self.cache:
            symbols = tuple(w + "_")
            for pair in self.merges:
                symbols = join_pair(symbols, pair)
            self.cache[w] = [self.ids[s] for s in symbols]
        return self.cache[w]

    def encode(self, line):
        return [i for w in line.split() for i in self.word(w)] + [0]


def pack(tokenizer, lines, length):
    """All lines one after another, in rows of length + 1 (the last token of a row is the first of the next)."""
    stream = torch.tensor([i for line in lines for i in tokenizer.encode(line)])
    rows = (len(stream) - 1) // length
    return stream[: rows * length + 1].unfold(0, length + 1, length)


# ---------------------------------------------------------------- model
class GRULM(nn.Module):
    def __init__(self, vocab_size, d=64):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, vocab_size, bias=False)
        self.out.weight = self.emb.weight
        nn.init.normal_(self.emb.weight, std=0.1)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


@torch.no_grad()
def perplexity(model, rows, device):
    """Per token, over the validation lines of all ranks."""
    sums = torch.zeros(2, device=device)
    for row in rows.split(64):
        row = row.to(device)
        sums[0] += F.cross_entropy(model(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten(), reduction="sum")
        sums[1] += row[:, 1:].numel()
    dist.all_reduce(sums)
    return math.exp(sums[0] / sums[1])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lines", type=int, default=3000)
    p.add_argument("--vocab", type=int, default=120)
    p.add_argument("--length", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--ckpt", default="lm.pt")
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    lines, val_lines = make_lines(args.lines, seed=1), make_lines(args.lines // 8, seed=2)
    ckpt = torch.load(args.ckpt, map_location=device) if args.resume else None
    # rank 0 trains the tokenizer on all lines (or takes it from the checkpoint), the others get it from rank 0
    box = [None]
    if rank == 0:
        box = [ckpt["bpe"] if ckpt else train_bpe(lines, args.vocab - 1)]
    dist.broadcast_object_list(box, src=0, device=device)
    tokenizer = Tokenizer(*box[0])

    rows = pack(tokenizer, lines[rank::world], args.length)
    val_rows = pack(tokenizer, val_lines[rank::world], args.length)
    # the parts differ a little in their number of tokens: the rank with the fewest rows sets the number of steps
    n_rows = torch.tensor(len(rows), device=device)
    dist.all_reduce(n_rows, op=dist.ReduceOp.MIN)
    steps = n_rows.item() // args.batch

    torch.manual_seed(0)
    model = DDP(GRULM(args.vocab).to(device), device_ids=[local_rank] if device.type == "cuda" else None)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.05, total_iters=args.epochs * steps)
    first = 0
    if ckpt:
        model.module.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["opt"])
        sched.load_state_dict(ckpt["sched"])
        first = ckpt["epoch"] + 1

    for epoch in range(first, args.epochs):
        perm = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1000 * epoch + rank))
        model.train()
        total = torch.zeros((), device=device)
        for step in range(steps):
            batch = rows[perm[step * args.batch : (step + 1) * args.batch]].to(device)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            total += loss.detach()
        dist.all_reduce(total)
        model.eval()
        ppl = perplexity(model.module, val_rows, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / steps / world:.3f}, validation perplexity {ppl:.2f}", flush=True)
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                        "bpe": box[0], "epoch": epoch}, args.ckpt)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
