"""Credit default on tabular data, few positives: one process per device with torch.multiprocessing.spawn, half precision, early stopping.

    python train.py --nprocs 2 --out run

Goes on from run/checkpoint.pt if there is one.
"""
import argparse
import os
import socket

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from sklearn.metrics import roc_auc_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset, random_split

CARDINALITIES = (12, 7, 30)


def load_table(n=4000, seed=7):
    """Eight numbers of very different size, three categories, and a default in about one of ten rows."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(n, 8))
    categories = np.stack([rng.integers(0, c, n) for c in CARDINALITIES], axis=1)
    effects = [rng.normal(0, 0.8, c) for c in CARDINALITIES]
    score = 1.2 * numbers[:, 0] - numbers[:, 1] * (numbers[:, 2] > 0) + 0.7 * numbers[:, 3] ** 2
    score += sum(e[categories[:, i]] for i, e in enumerate(effects)) + rng.normal(0, 0.7, n)
    target = score > np.quantile(score, 0.9)
    numbers = numbers * [1, 5, 20, 1, 300, 1, 2, 0.1] + [0, 2, 50, 0, 900, 1, 0, 0]
    return TensorDataset(torch.tensor(numbers, dtype=torch.float32), torch.tensor(categories),
                         torch.tensor(target, dtype=torch.float32))


class DistributedWeightedSampler(Sampler):
    """All processes draw the same weighted sample of the whole data set; each takes its own part of it."""

    def __init__(self, weights, num_samples, rank, world, seed):
        self.weights, self.rank, self.world, self.seed, self.epoch = weights, rank, world, seed, 0
        self.num_samples = num_samples // world

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.num_samples * self.world, replacement=True, generator=g)
        return iter(drawn[self.rank::self.world].tolist())

    def __len__(self):
        return self.num_samples


class TabularNet(nn.Module):
    def __init__(self, mean, std, dropout):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.embeddings = nn.ModuleList(nn.Embedding(c, min(8, (c + 1) // 2)) for c in CARDINALITIES)
        width = len(mean) + sum(e.embedding_dim for e in self.embeddings)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.ReLU(),
                                 nn.Dropout(dropout), nn.Linear(64, 1))

    def forward(self, numbers, categories):
        parts = [(numbers - self.mean) / self.std] + [e(categories[:, i]) for i, e in enumerate(self.embeddings)]
        return self.mlp(torch.cat(parts, dim=1)).squeeze(1)


@torch.no_grad()
def evaluate(model, loader, device, world):
    """Area under the ROC curve and log loss over the rows of all processes."""
    model.eval()
    scores, targets = [], []
    for numbers, categories, target in loader:
        scores.append(model(numbers.to(device), categories.to(device)).cpu())
        targets.append(target)
    local = (torch.cat(scores), torch.cat(targets))
    parts = [None] * world
    dist.all_gather_object(parts, local)
    scores, targets = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    loss = nn.functional.binary_cross_entropy_with_logits(scores, targets).item()
    return roc_auc_score(targets.numpy(), scores.numpy()), loss


def worker(rank, world, args):
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", rank=rank, world_size=world)
    torch.manual_seed(args.seed + rank)

    table = load_table()
    train_set, val_set = random_split(table, [3200, 800], generator=torch.Generator().manual_seed(args.seed))
    numbers, _, target = train_set[:]
    weights = torch.where(target == 1, 0.5 / target.sum(), 0.5 / (1 - target).sum())
    sampler = DistributedWeightedSampler(weights, args.rows_per_epoch, rank, world, args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=256)

    model = TabularNet(numbers.mean(0), numbers.std(0), args.dropout).to(device)
    ddp = DDP(model, device_ids=[rank] if use_cuda else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0 ** 12)

    first_epoch, best, waiting = 0, 0.0, 0
    path = os.path.join(args.out, "checkpoint.pt")
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
        first_epoch, best, waiting = state["epoch"] + 1, state["best"], state["waiting"]

    for epoch in range(first_epoch, args.epochs):
        if waiting >= args.patience:
            if rank == 0:
                print(f"stopped early before epoch {epoch}, best auc {best:.4f}", flush=True)
            break
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + 10_000 * (epoch + 1) + rank)
        ddp.train()
        total = torch.zeros((), device=device)
        for numbers, categories, target in train_loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                logits = ddp(numbers.to(device), categories.to(device))
            loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), target.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        dist.all_reduce(total)
        auc, val_loss = evaluate(model, val_loader, device, world)
        scheduler.step(val_loss)
        waiting = 0 if auc > best else waiting + 1
        best = max(best, auc)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / world / len(train_loader):.4f}, val loss {val_loss:.4f}, "
                  f"auc {auc:.4f}, lr {optimizer.param_groups[0]['lr']:g}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), "epoch": epoch,
                        "best": best, "waiting": waiting}, path + ".tmp")
            os.replace(path + ".tmp", path)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nprocs", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rows-per-epoch", type=int, default=2400)
    parser.add_argument("--batch-size", type=int, default=120, help="rows per step over all processes")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--patience", type=int, default=4)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(s.getsockname()[1])
    mp.spawn(worker, args=(args.nprocs, args), nprocs=args.nprocs)


if __name__ == "__main__":
    main()
