"""A small GPT that learns to sort letters ("dacb>abcd"): Muon for the matrices, AdamW for the rest, batches of one length each,
two batches per step, dropout. Starts its own processes."""
import argparse
import contextlib
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

LETTERS = 12
ARROW, VOCAB = LETTERS, LETTERS + 1


class Words(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(3, 9, (n,), generator=g).tolist()
        self.words = [torch.randint(LETTERS, (k,), generator=g) for k in self.lengths]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        word = self.words[i]
        return torch.cat([word, torch.tensor([ARROW]), word.sort().values])


class OneLengthBatches(Sampler):
    """Batches of words of the same length, in random order; every rank gets its part of every batch."""

    def __init__(self, lengths, batch, rank, world, seed=0):
        self.lengths, self.batch, self.rank, self.world, self.seed, self.epoch = torch.tensor(lengths), batch, rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        shuffled = torch.randperm(len(self.lengths), generator=g)
        size = self.batch
        batches = []
        for length in self.lengths.unique():
            same = shuffled[self.lengths[shuffled] == length]
            batches += [b for b in same.split(size) if len(b) == size]
        for i in torch.randperm(len(batches), generator=g).tolist():
            yield batches[i][self.rank::self.world].tolist()


class Layer(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.down(F.relu(self.up(self.norm2(x))).square()))


class Gpt(nn.Module):
    def __init__(self, dim=64, depth=2, heads=4, dropout=0.1):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, dim), nn.Embedding(20, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, x):
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def answer_loss(model, words):
    """Sum of the cross entropy over the sorted half, and the number of letters in it."""
    n = words.shape[1] // 2
    logits = model(words[:, :-1])[:, n:]
    return F.cross_entropy(logits.flatten(0, 1), words[:, n + 1:].flatten(), reduction="sum"), words[:, n + 1:].numel()


@torch.no_grad()
def solved(model, words, rank, world, device):
    """Share of words that are sorted without an error, letter after letter."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for word in (words[i].to(device) for i in range(rank, len(words), world)):
        n = len(word) // 2
        text = word[None, :n + 1]
        for _ in range(n):
            text = torch.cat([text, model(text)[:, -1].argmax(1, keepdim=True)], 1)
        sums += torch.tensor([float(torch.equal(text[0], word)), 1.0], device=device)
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def worker(rank, world, port, args):
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.manual_seed(0)

    train, test = Words(1500, seed=1), Words(150, seed=2)
    batches = OneLengthBatches(train.lengths, args.batch, rank, world, seed=25)
    loader = DataLoader(train, batch_sampler=batches)

    model = Gpt(dropout=args.dropout).to(device)
    ddp = DDP(model, device_ids=[rank] if cuda else None)
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [muon, adam]
    shape = lambda s: min(1.0, (s + 1) / 8) * max(0.1, 1 - s / 75)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, shape) for o in optimizers]

    os.makedirs(args.out, exist_ok=True)
    path, first = os.path.join(args.out, "state.pt"), 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        for o, s in zip(optimizers, state["optimizers"]):
            o.load_state_dict(s)
        for sch, s in zip(schedulers, state["schedulers"]):
            sch.load_state_dict(s)
        first = state["epoch"] + 1

    for epoch in range(first, args.epochs):
        batches.set_epoch(epoch)
        torch.manual_seed(10_000 * (epoch + 1) + rank)  # dropout: other masks on every rank and in every epoch, also after a restart
        total, letters, steps, group = torch.zeros((), device=device), 0, 0, []
        for words in loader:
            group.append(words.to(device))
            if len(group) < args.accumulate:
                continue
            goal = world * sum(len(w) * (w.shape[1] // 2) for w in group)  # answer letters of this step on all ranks
            for i, words in enumerate(group):
                last = i == len(group) - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    loss, n = answer_loss(ddp, words)
                    (loss * world / goal).backward()
                total += loss.detach()
                letters += n
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for o in optimizers:
                o.step()
                o.zero_grad(set_to_none=True)
            for s in schedulers:
                s.step()
            group, steps = [], steps + 1
        dist.barrier()  # the epoch ends for all together
        sums = torch.stack([total, torch.tensor(float(letters), device=device)])
        dist.all_reduce(sums)
        share = solved(model, test, rank, world, device)
        if rank == 0:
            print(f"epoch {epoch} ({steps} steps): loss {sums[0] / sums[1]:.4f}, solved {share:.4f}", flush=True)
            torch.save({"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
                        "schedulers": [s.state_dict() for s in schedulers], "epoch": epoch}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=48, help="words per batch over all processes")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, args=(args.processes, port, args), nprocs=args.processes)


if __name__ == "__main__":
    main()
