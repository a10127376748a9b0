"""Recommender with embeddings (BPR on implicit feedback); the gradients are averaged by hand, without DDP.

    torchrun --nproc-per-node=2 train.py

Saves run/last.pt every --save-every steps and goes on from there, in the middle of an epoch as well.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

USERS, ITEMS, GENRES = 240, 160, 8


def make_clicks(seed=21):
    """(user, item) pairs for training, one held-out item per user, genre of every item."""
    g = torch.Generator().manual_seed(seed)
    genre = torch.randint(0, GENRES, (ITEMS,), generator=g)
    taste = 1.5 * torch.randn(USERS, GENRES, generator=g)
    fame = 0.7 * torch.randn(ITEMS, generator=g)
    score = taste[:, genre] + fame + 0.5 * torch.randn(USERS, ITEMS, generator=g)
    gumbel = -torch.log(-torch.log(torch.rand(USERS, ITEMS, generator=g)))
    liked = (1.5 * score + gumbel).topk(17, dim=1).indices
    held = torch.arange(USERS) % 17
    keep = torch.ones_like(liked, dtype=torch.bool)
    keep[torch.arange(USERS), held] = False
    pairs = torch.stack([torch.arange(USERS).repeat_interleave(16), liked[keep]], 1)
    return pairs, liked[torch.arange(USERS), held], genre


class Ranker(nn.Module):
    def __init__(self, genre, dim=24):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)
        self.genre = nn.Embedding(GENRES, dim)
        self.mix = nn.Linear(2 * dim, dim)
        self.bias = nn.Parameter(torch.zeros(ITEMS))
        for table in (self.user, self.item, self.genre):
            nn.init.normal_(table.weight, std=0.3)
        self.register_buffer("item_genre", genre)

    def items(self, ids):
        return self.mix(torch.cat([self.item(ids), self.genre(self.item_genre[ids])], -1))

    def forward(self, users, items):
        return (self.user(users) * self.items(items)).sum(-1) + self.bias[items]


def average_gradients(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def lr_factor(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


@torch.no_grad()
def hit_rate(model, held, seen, rank, world, k=10):
    """Part of the users whose held-out item is among the k best unseen items."""
    device = held.device
    users = torch.arange(rank, USERS, world, device=device)
    items = model.items(torch.arange(ITEMS, device=device))
    scores = model.user(users) @ items.t() + model.bias
    scores[seen[users]] = -torch.inf
    hits = (scores.topk(k).indices == held[users, None]).sum()
    count = torch.tensor(len(users), device=device)
    dist.all_reduce(hits)
    dist.all_reduce(count)
    return hits.item() / count.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=480, help="clicks per step over all ranks")
    parser.add_argument("--lr", type=float, default=4.0)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--clip", type=float, default=0.14)
    parser.add_argument("--patience", type=int, default=1, help="epochs without a better hit rate")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    pairs, held, genre = make_clicks()
    held = held.to(device)
    seen = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    seen[pairs[:, 0], pairs[:, 1]] = True
    seen = seen.to(device)
    per_epoch = len(pairs) // args.batch
    total = per_epoch * args.epochs

    torch.manual_seed(0)
    model = Ranker(genre).to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.8)

    path = os.path.join(args.out, "last.pt")
    first, best, bad, losses = 0, 0.0, 0, torch.zeros(2, device=device)
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, best, bad, losses = state["step"], state["best"], state["bad"], state["losses"]

    def save(step):
        if rank == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
                        "best": best, "bad": bad, "losses": losses}, path + ".tmp")
            os.replace(path + ".tmp", path)

    for step in range(first, total):
        if bad >= args.patience:
            break
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(epoch))
        index = order[place * args.batch:(place + 1) * args.batch]
        # negatives for the whole global batch, of which each rank takes its own part
        wrong = torch.randint(0, ITEMS, (args.batch,), generator=torch.Generator().manual_seed(10_000 + step))[rank::world]
        users, right = pairs[index[rank::world]].unbind(1)
        users, right, wrong = users.to(device), right.to(device), wrong.to(device)

        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_factor(step, args.warmup, total)
        loss = -F.logsigmoid(model(users, right) - model(users, wrong)).mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, world)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()

        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses += torch.stack([mean, torch.ones_like(mean)])
        if place == per_epoch - 1:
            hits = hit_rate(model, held, seen, rank, world)
            best, bad = (hits, 0) if hits > best else (best, bad + 1)
            if rank == 0:
                print(f"epoch {epoch}: loss {(losses[0] / losses[1]).item():.4f}  hit rate@10 {hits:.4f}  best {best:.4f}  "
                      f"lr {optimizer.param_groups[0]['lr']:.4f}", flush=True)
            losses = torch.zeros_like(losses)
        if (step + 1) % args.save_every == 0 or step + 1 == total or bad >= args.patience:
            save(step + 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
