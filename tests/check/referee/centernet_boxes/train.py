"""A small CenterNet: finds filled and hollow rectangles in 32x32 images (class heatmap and box size on a grid of stride 4).

    torchrun --nproc-per-node=2 train.py

Continues from run/last.pt if that exists; run/best.pt holds the weights with the best F1 on the validation images.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES, GRID, STRIDE = 2, 8, 4


def make_scenes(count, seed):
    """Images with 1 to 6 rectangles: (image, heatmap, size, centre mask)."""
    g = torch.Generator().manual_seed(seed)
    images = 0.15 * torch.randn(count, 1, 32, 32, generator=g)
    heat = torch.zeros(count, CLASSES, GRID, GRID)
    size = torch.zeros(count, 2, GRID, GRID)
    rows = torch.arange(GRID).view(-1, 1)
    cols = torch.arange(GRID).view(1, -1)
    for n in range(count):
        for _ in range(int(torch.randint(1, 7, (1,), generator=g))):
            h, w = torch.randint(4, 11, (2,), generator=g).tolist()
            y, x = (int(torch.randint(0, 32 - s, (1,), generator=g)) for s in (h, w))
            kind = int(torch.randint(0, CLASSES, (1,), generator=g))
            images[n, 0, y:y + h, x:x + w] += 1
            if kind == 1:
                images[n, 0, y + 1:y + h - 1, x + 1:x + w - 1] -= 1
            cy, cx = (y + h // 2) // STRIDE, (x + w // 2) // STRIDE
            blob = torch.exp(-((rows - cy) ** 2 + (cols - cx) ** 2) / 0.7)
            heat[n, kind] = torch.maximum(heat[n, kind], blob)
            size[n, :, cy, cx] = torch.tensor([h, w]) / 10
    return images, heat, size, (heat == 1).any(1, keepdim=True).float()


class CenterNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, 1, 1), nn.GroupNorm(4, 2 * width), nn.ReLU())
        self.heat = nn.Conv2d(2 * width, CLASSES, 1)
        self.size = nn.Conv2d(2 * width, 2, 1)
        nn.init.constant_(self.heat.bias, -2.2)

    def forward(self, x):
        x = self.body(x)
        return self.heat(x), self.size(x)


def loss_sum(model, images, heat, size, mask):
    """Focal loss of the heatmap and L1 loss of the sizes, summed over all objects."""
    logits, boxes = model(images)
    p = logits.sigmoid()
    positive = heat.eq(1).float()
    focal = -(positive * (1 - p) ** 2 * F.logsigmoid(logits)
              + (1 - positive) * (1 - heat) ** 4 * p ** 2 * F.logsigmoid(-logits)).sum()
    return focal + ((boxes - size).abs() * mask).sum(), p


@torch.no_grad()
def validate(model, data, batch, device):
    """Loss per object and F1 of the detected centres; every rank looks at its own part of the images."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    totals = torch.zeros(5, dtype=torch.double, device=device)  # loss, objects, hits, false alarms, misses
    mine = [t[rank::world].to(device) for t in data]
    for start in range(0, len(mine[0]), batch):
        part = [t[start:start + batch] for t in mine]
        loss, p = loss_sum(model, *part)
        peaks = (p > 0.3) & (p == F.max_pool2d(p, 3, 1, 1))
        truth = part[1].eq(1)
        totals += torch.stack([loss, part[3].sum(), (peaks & truth).sum(), (peaks & ~truth).sum(), (~peaks & truth).sum()])
    model.train()
    dist.all_reduce(totals)
    loss, objects, hits, false, misses = totals.tolist()
    return loss / objects, 2 * hits / max(2 * hits + false + misses, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--batch", type=int, default=60, help="images per step over all ranks")
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(1)

    train_set = TensorDataset(*make_scenes(480, seed=10))
    val_set = make_scenes(45, seed=50)
    sampler = DistributedSampler(train_set, shuffle=True, seed=3)
    loader = DataLoader(train_set, batch_size=args.batch // world, sampler=sampler, drop_last=True, pin_memory=cuda)

    net = CenterNet().to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0, threshold=0.01)

    last, first, best = os.path.join(args.out, "last.pt"), 0, 0.0
    if os.path.exists(last):
        state = torch.load(last, map_location=device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first, best = state["epoch"] + 1, state["best"]

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device=device)
        for batch in loader:
            batch = [t.to(device, non_blocking=True) for t in batch]
            total, _ = loss_sum(model, *batch)
            # DDP averages over the ranks, whose images hold different numbers of objects
            objects = batch[3].sum()
            dist.all_reduce(objects)
            loss = total * world / objects
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            running += loss.detach() / len(loader)
        dist.all_reduce(running)
        val_loss, f1 = validate(net, val_set, args.batch, device)
        scheduler.step(f1)

        if rank == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch}: train {running.item() / world:.4f}  val {val_loss:.4f}  F1 {f1:.4f}  next lr {lr:.5f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            if f1 > best:
                print(f"  best so far, F1 {best:.4f} -> {f1:.4f}", flush=True)
                best = f1
                torch.save({"net": net.state_dict(), "f1": f1, "epoch": epoch}, os.path.join(args.out, "best.pt"))
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                        "epoch": epoch, "best": best}, last + ".tmp")
            os.replace(last + ".tmp", last)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
