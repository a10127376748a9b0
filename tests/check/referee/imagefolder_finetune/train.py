"""Fine-tune a small convolutional network on an ImageFolder, on one or several processes.

    torchrun --nproc-per-node=2 train.py

The backbone is frozen in the first epoch, then everything is trained with a cosine schedule. One start runs at most
--epochs-per-start epochs (our queue has short time slots); starting the same command again goes on from last.pt.
The folder --out has to be on a file system that all processes see.
"""
import argparse
import os
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

CLASSES = ("cross", "disc", "ring", "square", "triangle")


def draw(kind, rng, size=32):
    y, x = np.mgrid[0:size, 0:size] - size / 2 - rng.uniform(-5, 5, (2, 1, 1))
    r, far, near = rng.uniform(6, 10), np.maximum(abs(x), abs(y)), np.minimum(abs(x), abs(y))
    inside = {"cross": (far < r) & (near < r / 3), "disc": np.hypot(x, y) < r, "square": far < 0.85 * r,
              "ring": (np.hypot(x, y) < r) & (np.hypot(x, y) > 0.6 * r),
              "triangle": (y < 0.7 * r) & (2 * abs(x) < y + r)}[kind]
    image = np.where(inside[..., None], rng.uniform(90, 255, 3), rng.uniform(0, 150, 3)) + rng.normal(0, 20, (size, size, 3))
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


def make_images(root, seed, per_class={"train": 144, "val": 41}):
    rng, tmp = np.random.default_rng(seed), root.with_name(root.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    for split, count in per_class.items():
        for kind in CLASSES:
            (tmp / split / kind).mkdir(parents=True)
            for i in range(count):
                draw(kind, rng).save(tmp / split / kind / f"{i:04d}.png")
    tmp.rename(root)  # a folder with this name is always complete


class Net(nn.Module):
    def __init__(self, n_classes, width=24):
        super().__init__()
        layers, c = [], 3
        for k in (width, 2 * width, 2 * width):
            layers += [nn.Conv2d(c, k, 3, padding=1), nn.GroupNorm(4, k), nn.ReLU(), nn.MaxPool2d(2)]
            c = k
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(c * 16, 64), nn.ReLU(), nn.Linear(64, n_classes))

    def forward(self, x):
        return self.head(self.backbone(x))


@torch.no_grad()
def evaluate(net, loader, device):
    net.eval()
    right_total = torch.zeros(2, device=device, dtype=torch.float64)
    for x, y in loader:
        right = net(x.to(device)).argmax(1) == y.to(device)
        right_total += torch.stack([right.sum(), torch.tensor(len(y), device=device)])
    dist.all_reduce(right_total)
    return (right_total[0] / right_total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--backbone-weights", type=Path, help="pretrained weights of the backbone (a state_dict)")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--epochs-per-start", type=int, default=4)
    parser.add_argument("--freeze-epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=48, help="images in one step, over all processes")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--backbone-lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    local_rank, on_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    assert args.batch_size % world == 0, f"--batch-size has to be divisible by {world}"

    images = args.out / "images"
    if rank == 0 and not images.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        make_images(images, args.seed)
    dist.barrier()  # the others wait until the images are there

    to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.45] * 3, [0.25] * 3)])
    augment = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.RandomCrop(32, padding=2), to_tensor])
    train_set, val_set = ImageFolder(images / "train", augment), ImageFolder(images / "val", to_tensor)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler, drop_last=True,
                              num_workers=args.workers)
    # no DistributedSampler here: it would count some images twice
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=64, num_workers=args.workers)

    torch.manual_seed(args.seed)
    net = Net(len(train_set.classes)).to(device)
    if args.backbone_weights:
        net.backbone.load_state_dict(torch.load(args.backbone_weights, map_location=device))
    optimizer = torch.optim.AdamW([{"params": net.head.parameters(), "lr": args.lr},
                                   {"params": net.backbone.parameters(), "lr": args.backbone_lr}], weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader))
    first_epoch, best = 0, 0.0
    last_file, best_file = args.out / "last.pt", args.out / "best.pt"
    if last_file.exists():
        state = torch.load(last_file, map_location=device)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch, best = state["epoch"] + 1, state["best"]

    model = None
    for epoch in range(first_epoch, min(args.epochs, first_epoch + args.epochs_per_start)):
        if model is None or epoch == args.freeze_epochs:
            net.backbone.requires_grad_(epoch >= args.freeze_epochs)
            model = DDP(net, device_ids=[local_rank] if on_gpu else None)
        torch.manual_seed(args.seed + 1000 * (epoch + 1) + rank)  # augmentation: different on each process, same after a resume
        sampler.set_epoch(epoch)
        model.train()
        loss_sum = torch.zeros((), device=device)
        for x, y in train_loader:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        accuracy = evaluate(net, val_loader, device)
        is_best, best = accuracy > best, max(best, accuracy)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss_sum.item() / (world * len(train_loader)):.4f}  accuracy {accuracy:.4f}"
                  f"  lr {scheduler.get_last_lr()[0]:.5f}", flush=True)
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                        "epoch": epoch, "best": best}, last_file.with_suffix(".tmp"))
            os.replace(last_file.with_suffix(".tmp"), last_file)
            if is_best:
                shutil.copyfile(last_file, best_file)
    if rank == 0:
        print(f"best accuracy {best:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
