"""SASRec on made-up playlists: a small causal transformer predicts the next song of each listener; sampled negatives, DDP, ranking metrics over the whole catalogue.

    torchrun --nproc-per-node=2 train.py
"""
import argparse
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SONGS, MAXLEN = 240, 24


def make_playlists(users, seed=11):
    """Each listener wanders through one or two genres; within a genre songs tend to follow each other in a fixed order."""
    rng = np.random.default_rng(seed)
    genre = rng.permutation(SONGS).reshape(12, 20) + 1  # song 0 is padding
    lists = []
    for _ in range(users):
        length = int(np.clip(rng.geometric(0.12) + 5, 6, MAXLEN + 2))
        likes, songs = rng.choice(12, 2, replace=False), []
        g, at = likes[0], rng.integers(20)
        for _ in range(length):
            songs.append(genre[g, at])
            if rng.random() < 0.1:
                g = likes[rng.integers(2)]
            at = (at + 1) % 20 if rng.random() < 0.75 else rng.integers(20)
        lists.append(np.array(songs))
    return lists


class TrainSet(Dataset):
    """One listener per item: inputs, the songs that follow, and one song per place that the listener never played."""

    def __init__(self, lists, seed):
        self.lists, self.seed, self.epoch = lists, seed, 0

    def __len__(self):
        return len(self.lists)

    def __getitem__(self, i):
        songs = self.lists[i][:-1]  # the last one is for evaluation
        rng = np.random.default_rng((self.seed, self.epoch, i))
        unseen = np.setdiff1d(np.arange(1, SONGS + 1), self.lists[i])
        n = len(songs) - 1
        seq, pos, neg = (np.zeros(MAXLEN, dtype=np.int64) for _ in range(3))
        seq[:n], pos[:n], neg[:n] = songs[:-1], songs[1:], rng.choice(unseen, n)
        return seq, pos, neg


class SASRec(nn.Module):
    def __init__(self, dim=48, heads=2, layers=2, dropout=0.1):
        super().__init__()
        self.song = nn.Embedding(SONGS + 1, dim, padding_idx=0)
        self.place = nn.Embedding(MAXLEN, dim)
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.reset_embeddings()

    def reset_embeddings(self):
        nn.init.normal_(self.song.weight, std=0.1)
        nn.init.normal_(self.place.weight, std=0.1)
        with torch.no_grad():
            self.song.weight[0].zero_()

    def states(self, seq):
        n = seq.shape[1]
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool, device=seq.device), 1)
        h = self.drop(self.song(seq) + self.place.weight[:n])
        return self.body(h, mask=mask)

    def forward(self, seq, pos, neg):
        h = self.states(seq)
        return (h * self.song(pos)).sum(-1), (h * self.song(neg)).sum(-1)


@torch.no_grad()
def evaluate(model, lists, rank, world, device):
    """Hit rate and NDCG at 10: rank of each listener's last song among all songs. Every process takes each world-th listener."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    mine = lists[rank::world]
    for at in range(0, len(mine), 128):
        part = mine[at:at + 128]
        seq = torch.zeros(len(part), MAXLEN, dtype=torch.long)
        for row, songs in enumerate(part):
            known = songs[:-1][-MAXLEN:]
            seq[row, :len(known)] = torch.from_numpy(known)
        end = (seq > 0).sum(1) - 1
        target = torch.tensor([s[-1] for s in part], device=device)
        h = model.states(seq.to(device))[torch.arange(len(part)), end.to(device)]
        scores = h @ model.song.weight.T
        scores[:, 0] = -math.inf
        place = (scores > scores.gather(1, target[:, None])).sum(1)
        hit = place < 10
        sums[0] += hit.sum()
        sums[1] += (hit / torch.log2(place + 2.0)).sum()
        sums[2] += len(part)
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=1158)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=96, help="listeners per step, all processes together")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(args.seed)

    lists = make_playlists(args.users)
    train = TrainSet(lists, args.seed)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler, drop_last=True)

    model = SASRec(dropout=args.dropout).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    total = args.epochs * len(loader)

    def factor(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (total - args.warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "last.pt")
    first, best = 0, 0.0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first, best = state["epoch"] + 1, state["best"]

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        train.epoch = epoch
        torch.manual_seed(args.seed + 7919 * (epoch + 1) + rank)  # dropout: own numbers in each process and epoch, also after a resume
        seen = torch.zeros(2, device=device)
        for seq, pos, neg in loader:
            seq, pos, neg = seq.to(device), pos.to(device), neg.to(device)
            good, bad = ddp(seq, pos, neg)
            real = pos > 0
            loss = (F.softplus(-good) + F.softplus(bad))[real].sum()
            places = real.sum()
            seen += torch.stack([loss.detach(), places])
            dist.all_reduce(places)  # playlists differ in length: the mean is over the songs of all processes
            optimizer.zero_grad()
            (loss * world / places).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            scheduler.step()
        dist.all_reduce(seen)
        hit, ndcg = evaluate(model, lists, rank, world, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {seen[0] / seen[1]:.4f}, hit@10 {hit:.4f}, ndcg@10 {ndcg:.4f}, lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                     "epoch": epoch, "best": max(best, ndcg)}
            if ndcg > best:
                torch.save(state["model"], os.path.join(args.out, "best.pt"))
            torch.save(state, path + ".tmp")
            os.replace(path + ".tmp", path)
        best = max(best, ndcg)
        dist.barrier()
    if rank == 0:
        print(f"best ndcg@10 {best:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
