"""Cell segmentation with a small U-Net: processes by mp.spawn, DDP, gradient accumulation, EMA weights, poly schedule, mean IoU.

    python train.py --procs 2
"""
import argparse
import contextlib
import copy
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset

CLASSES = 3  # background, round cells, long cells
SIDE = 32


def draw_cells(n, seed, long):
    """Noisy grey images: some light round cells in each, a dark long one in a part of them."""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(float(SIDE)), torch.arange(float(SIDE)), indexing="ij")
    images, masks = torch.zeros(n, SIDE, SIDE), torch.zeros(n, SIDE, SIDE, dtype=torch.long)
    for i in range(n):
        kinds = [1] * int(torch.randint(1, 5, (1,), generator=g)) + [2] * int(torch.rand(1, generator=g) < long)
        for kind in kinds:
            cy, cx, size, turn, light = torch.rand(5, generator=g).tolist()
            cy, cx, turn = 4 + 24 * cy, 4 + 24 * cx, 3.1416 * turn
            u = (y - cy) * torch.cos(torch.tensor(turn)) + (x - cx) * torch.sin(torch.tensor(turn))
            v = (x - cx) * torch.cos(torch.tensor(turn)) - (y - cy) * torch.sin(torch.tensor(turn))
            a, b = (2.5 + 1.5 * size,) * 2 if kind == 1 else (7 + 3 * size, 1.6 + 0.6 * size)
            inside = (u / a) ** 2 + (v / b) ** 2 < 1
            images[i][inside] = (0.5 + 0.5 * light) * (1 if kind == 1 else -1)
            masks[i][inside] = kind
    return images[:, None] + 0.25 * torch.randn(n, 1, SIDE, SIDE, generator=g), masks


class Cells(Dataset):
    def __init__(self, n, seed, long=0.6, flip=False):
        self.images, self.masks = draw_cells(n, seed, long)
        self.flip, self.epoch = flip, 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, mask = self.images[i], self.masks[i]
        if self.flip:  # depends on epoch and image only, so that a resumed run sees the same flips
            g = torch.Generator().manual_seed(self.epoch * len(self) + i)
            dims = [d for d in (-2, -1) if torch.rand((), generator=g) < 0.5]
            image, mask = image.flip(dims), mask.flip(dims)
        return image, mask


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU(),
                         nn.Conv2d(cout, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2, self.bottom = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([b, F.interpolate(c, scale_factor=2)], 1))
        return self.head(self.up1(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)))


def seg_loss(logits, mask):
    """Cross entropy and a soft Dice term, both of each image, averaged over the images."""
    ce = F.cross_entropy(logits, mask)
    p, t = logits.softmax(1), F.one_hot(mask, CLASSES).movedim(-1, 1)
    dice = (2 * (p * t).sum((2, 3)) + 1) / ((p + t).sum((2, 3)) + 1)
    return ce + 0.5 * (1 - dice.mean())


@torch.no_grad()
def update_ema(ema, model, decay):
    for slow, fast in zip(ema.parameters(), model.parameters()):
        slow.mul_(decay).add_(fast, alpha=1 - decay)


@torch.no_grad()
def mean_iou(model, loader, device):
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.long, device=device)
    for image, mask in loader:
        guess = model(image.to(device)).argmax(1)
        index = mask.to(device) * CLASSES + guess
        confusion += torch.bincount(index.flatten(), minlength=CLASSES ** 2).view(CLASSES, CLASSES)
    dist.all_reduce(confusion)
    both = confusion.diag()
    return (both / (confusion.sum(0) + confusion.sum(1) - both).clamp(min=1)).mean().item()


def worker(rank, world, port, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    train = Cells(408, seed=100, flip=True)
    val = ConcatDataset([Cells(51, seed=200), Cells(50, seed=201, long=0.04)])  # two laboratories
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank * len(val) // world, (rank + 1) * len(val) // world)), batch_size=32)

    model = UNet().to(device)
    ddp = DDP(model, device_ids=[rank] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    updates = -(-len(loader) // args.accumulate)  # per epoch; the last one may have fewer batches
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=args.epochs * updates, power=0.9)
    ema = copy.deepcopy(model).requires_grad_(False)

    os.makedirs(args.out, exist_ok=True)
    path, first = os.path.join(args.out, "last.pt"), 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1
        if rank == 0:
            print(f"resumed after epoch {state['epoch']}", flush=True)

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        train.epoch = epoch
        total = torch.zeros((), device=device)
        optimizer.zero_grad()
        for i, (image, mask) in enumerate(loader):
            image, mask = image.to(device), mask.to(device)
            start = i - i % args.accumulate
            parts = min(args.accumulate, len(loader) - start)  # batches in this update
            last = i + 1 == start + parts
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = seg_loss(ddp(image), mask)
                (loss / parts).backward()
            total += loss.detach()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                update_ema(ema, model, args.decay)
        dist.all_reduce(total)
        iou = mean_iou(ema, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / world / len(loader):.4f}, mIoU {iou:.4f}, lr {scheduler.get_last_lr()[0]:.4f}", flush=True)
            torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch, "iou": iou}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=24, help="images per batch over all processes")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--decay", type=float, default=0.92)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, args=(args.procs, port, args), nprocs=args.procs)


if __name__ == "__main__":
    main()
