"""Heart beats (single lead, 96 samples) sorted into five very unequal classes with a small 1-D residual network.

Rare classes are drawn more often by a weighted sampler, gradients are accumulated over --accum micro-batches, the learning rate follows
the validation loss. A second start with the same arguments goes on from the last finished epoch.

    torchrun --nproc-per-node=2 train.py
"""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

CLASSES = 5
SHARE = (0.62, 0.16, 0.12, 0.06, 0.04)


class Beats(Dataset):
    """Sums of three waves (P, QRS, T) whose shape depends on the class; shift, gain and noise belong to the sample and the epoch."""

    def __init__(self, n, seed, augment):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.multinomial(torch.tensor(SHARE), n, replacement=True, generator=g)
        t = torch.linspace(0, 1, 96)
        height = torch.tensor([[.25, 1., .35], [.0, .9, .4], [.2, 1.3, -.3], [.3, .7, .3], [.1, 1.1, .1]])[self.labels]
        width = torch.tensor([[.03, .02, .06], [.03, .03, .06], [.03, .06, .08], [.05, .025, .05], [.03, .04, .05]])[self.labels]
        place = torch.tensor([.25, .5, .75]) + 0.03 * torch.randn(n, 3, generator=g)
        height = height + 0.12 * torch.randn(n, 3, generator=g)
        waves = height[..., None] * torch.exp(-((t - place[..., None]) / width[..., None]) ** 2 / 2)
        self.signals = waves.sum(1) + 0.18 * torch.randn(n, 96, generator=g)
        self.augment, self.epoch, self.seed = augment, 0, seed

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        x = self.signals[i]
        if self.augment:
            g = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch + i)
            x = x.roll(int(torch.randint(-4, 5, (1,), generator=g)))
            x = x * (0.8 + 0.4 * torch.rand(1, generator=g)) + 0.05 * torch.randn(96, generator=g)
        return x[None], self.labels[i]


class DistributedWeightedSampler(Sampler):
    """Draws `total` samples with replacement, all ranks the same list, of which each rank takes every world-th."""

    def __init__(self, weights, total, rank, world, seed=0):
        self.weights, self.rank, self.world, self.seed = weights, rank, world, seed
        self.per_rank, self.epoch = total // world, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.per_rank

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, self.per_rank * self.world, replacement=True, generator=g)
        return iter(drawn[self.rank::self.world].tolist())


class Block(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(inside, outside, 5, stride=2, padding=2), nn.GroupNorm(4, outside), nn.ReLU(),
                                  nn.Conv1d(outside, outside, 5, padding=2), nn.GroupNorm(4, outside))
        self.skip = nn.Conv1d(inside, outside, 1, stride=2)

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def make_model(dropout):
    return nn.Sequential(Block(1, 16), Block(16, 32), Block(32, 32), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(dropout),
                         nn.Linear(32, CLASSES))


@torch.no_grad()
def evaluate(model, data, device, rank, world):
    """Loss and macro F1 over the whole validation set: every rank takes its own samples, counts are added up."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.double, device=device)
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.double, device=device)
    for part in torch.arange(rank, len(data), world).split(64):
        x, y = (torch.stack(column).to(device) for column in zip(*(data[int(i)] for i in part)))
        logits = model(x)
        sums += torch.stack([F.cross_entropy(logits, y, reduction="sum").double(), torch.tensor(float(len(y)), device=device)])
        confusion += torch.bincount(y * CLASSES + logits.argmax(1), minlength=CLASSES ** 2).view(CLASSES, CLASSES)
    dist.all_reduce(sums)
    dist.all_reduce(confusion)
    model.train()
    f1 = 2 * confusion.diag() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
    return (sums[0] / sums[1]).item(), f1.mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=768, help="samples drawn per epoch, all ranks together")
    parser.add_argument("--batch", type=int, default=48, help="samples per micro-batch, all ranks together")
    parser.add_argument("--accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--out", default="out")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(1)

    train_set, val_set = Beats(1500, 11, augment=True), Beats(403, 12, augment=False)
    per_class = torch.bincount(train_set.labels, minlength=CLASSES).double()
    sampler = DistributedWeightedSampler((1 / per_class.sqrt())[train_set.labels], args.samples, rank, world)
    loader = DataLoader(train_set, batch_size=args.batch // world, sampler=sampler, drop_last=True)

    model = make_model(args.dropout).to(device)
    ddp = DDP(model, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    last, first, best = os.path.join(args.out, "last.pt"), 0, 0.0
    if os.path.exists(last):
        state = torch.load(last, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first, best = state["epoch"] + 1, state["best"]

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        train_set.epoch = epoch
        torch.manual_seed(1000 * (epoch + 1) + rank)  # dropout: other masks on every rank, the same ones after a restart
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            is_last = (i + 1) % args.accum == 0
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                loss = F.cross_entropy(ddp(x), y) / args.accum
                loss.backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        val_loss, f1 = evaluate(model, val_set, device, rank, world)
        scheduler.step(val_loss)
        if rank == 0:
            print(f"epoch {epoch}: validation loss {val_loss:.4f}, macro F1 {f1:.4f}, lr {optimizer.param_groups[0]['lr']:.2e}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            if f1 > best:
                best = f1
                torch.save(model.state_dict(), os.path.join(args.out, "best.pt"))
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                        "epoch": epoch, "best": best}, last + ".tmp")
            os.replace(last + ".tmp", last)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
