"""Segment squares and discs with a small U-Net:  torchrun --nproc-per-node=2 train.py [--resume]"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

CLASSES = 3  # background, square, disc


def make_scenes(n, seed, size=24):
    """Ordered: the first third of the scenes shows squares, the second discs, the last both."""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    masks = torch.zeros(n, size, size, dtype=torch.long)
    for i, mask in enumerate(masks):
        sy, sx, dy, dx = torch.randint(4, 20, (4,), generator=g)
        if i < n // 3 or i >= 2 * n // 3:
            mask[(y - sy).abs().maximum((x - sx).abs()) <= 3] = 1
        if i >= n // 3:
            mask[(y - dy) ** 2 + (x - dx) ** 2 <= 12] = 2
    images = torch.tensor([0.0, 1.0, -1.0])[masks] + 0.7 * torch.randn(n, size, size, generator=g)
    return TensorDataset(images.unsqueeze(1), masks)


def conv_block(c_in, c_out, norm):
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1), norm(c_out), nn.ReLU(),
                         nn.Conv2d(c_out, c_out, 3, padding=1), norm(c_out), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, norm, width=8):
        super().__init__()
        self.down, self.bottom = conv_block(1, width, norm), conv_block(width, 2 * width, norm)
        self.up, self.head = conv_block(3 * width, width, norm), nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        skip = self.down(x)
        x = F.interpolate(self.bottom(F.max_pool2d(skip, 2)), scale_factor=2)
        return self.head(self.up(torch.cat([x, skip], 1)))


def reduce_sum(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def class_weights(dataset, rank, world_size, device):
    counts = torch.zeros(CLASSES, device=device)
    for i in range(rank * len(dataset) // world_size, (rank + 1) * len(dataset) // world_size):
        counts += torch.bincount(dataset[i][1].flatten(), minlength=CLASSES).to(device)
    counts = reduce_sum(counts)
    return (counts.sum() / (CLASSES * counts.clamp(min=1))).sqrt()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.long, device=device)
    for images, masks in loader:
        cells = CLASSES * masks.to(device) + model(images.to(device)).argmax(1)
        confusion += torch.bincount(cells.flatten(), minlength=CLASSES ** 2).view_as(confusion)
    confusion = reduce_sum(confusion)
    iou = confusion.diag() / (confusion.sum(0) + confusion.sum(1) - confusion.diag()).clamp(min=1)
    return iou.mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--ckpt-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    train_set, val_set = make_scenes(288, seed=1), make_scenes(90, seed=2)
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), args.batch_size)
    weights = class_weights(train_set, rank, world_size, device)
    net = UNet(nn.BatchNorm2d if cuda else lambda channels: nn.GroupNorm(4, channels))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)  # changes nothing where there is no BatchNorm
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, args.epochs * len(train_loader), power=0.9)
    first_epoch, best = 0, 0.0
    if args.resume:
        state = torch.load(os.path.join(args.ckpt_dir, "last.pt"), map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch, best = state["epoch"] + 1, state["best"]
    model = DDP(net, device_ids=[device.index] if cuda else None)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        losses = torch.zeros(2, device=device)
        for images, masks in train_loader:
            images, masks = images.to(device), masks.to(device)
            loss = (F.cross_entropy(model(images), masks, reduction="none") * weights[masks]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses += torch.stack([loss.detach(), torch.ones_like(loss)])
        losses, miou = reduce_sum(losses), evaluate(net, val_loader, device)
        is_best, best = miou > best, max(miou, best)
        if rank == 0:
            print(f"epoch {epoch}: loss {losses[0] / losses[1]:.4f}, mean IoU {miou:.4f}", flush=True)
            os.makedirs(args.ckpt_dir, exist_ok=True)
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch,
                     "scheduler": scheduler.state_dict(), "best": best}
            for name in ["last.pt", "best.pt"] if is_best else ["last.pt"]:
                torch.save(state, os.path.join(args.ckpt_dir, name + ".tmp"))
                os.replace(os.path.join(args.ckpt_dir, name + ".tmp"), os.path.join(args.ckpt_dir, name))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
