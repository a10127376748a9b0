"""Train a small CNN on synthetic images, one process per GPU:  torchrun --nproc-per-node=2 train.py"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("-b", "--batch-size", type=int, default=32, help="images per GPU")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output-dir", default="checkpoints")
    parser.add_argument("--resume", default="", help="checkpoint to go on from")
    return parser.parse_args()


class TextureImages(Dataset):
    def __init__(self, size, seed, augment, num_classes=8):
        textures = torch.randn(num_classes, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        g = torch.Generator().manual_seed(seed)
        self.labels, self.augment = torch.randint(num_classes, (size,), generator=g), augment
        self.images = 0.25 * textures[self.labels] + torch.randn(size, 3, 16, 16, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        flip = self.augment and torch.rand(()) < 0.5
        return self.images[index].flip(-1) if flip else self.images[index], self.labels[index]


def build_model(num_classes=8):
    return nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
                         nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
                         nn.Flatten(), nn.Linear(32 * 4 * 4, num_classes))


class AverageMeter:
    def __init__(self, device):
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, value, n):
        self.totals += torch.stack([value.detach() * n, torch.full_like(value, n)])

    def global_average(self):
        dist.all_reduce(self.totals)
        return (self.totals[0] / self.totals[1]).item()


def warmup_cosine(step, warmup_steps, total_steps):
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))))


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    accuracy = AverageMeter(device)
    for images, labels in loader:
        hits = model(images.to(device)).argmax(1) == labels.to(device)
        accuracy.update(hits.float().mean(), len(labels))
    return 100 * accuracy.global_average()


def main():
    args = get_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(args.seed)
    train_set = TextureImages(768, seed=args.seed, augment=True)
    val_set = TextureImages(250, seed=args.seed + 1, augment=False)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, pin_memory=True, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), args.batch_size)

    net = build_model().to(device)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    steps_per_epoch = len(train_loader)
    warmup_steps, total_steps = args.warmup_epochs * steps_per_epoch, args.epochs * steps_per_epoch
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warmup_cosine(s, warmup_steps, total_steps))
    start_epoch, best_acc = 0, 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device, weights_only=True)
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start_epoch, best_acc = checkpoint["epoch"] + 1, checkpoint["best_acc"]
    model = DDP(net, device_ids=[local_rank])
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + epoch * world_size + rank)  # every rank mirrors other images
        model.train()
        losses = AverageMeter(device)
        for images, labels in train_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.update(loss, len(labels))
        train_loss, acc = losses.global_average(), validate(net, val_loader, device)
        is_best, best_acc = acc > best_acc, max(acc, best_acc)
        if rank == 0:
            os.makedirs(args.output_dir, exist_ok=True)
            print(f"epoch {epoch}: loss {train_loss:.4f}, accuracy {acc:.2f} (best {best_acc:.2f})", flush=True)
            state = {"epoch": epoch, "model": net.state_dict(), "optimizer": optimizer.state_dict(),
                     "scheduler": scheduler.state_dict(), "best_acc": best_acc}
            for name in ["last.pt", "best.pt"] if is_best else ["last.pt"]:
                path = os.path.join(args.output_dir, name)
                torch.save(state, path + ".tmp")
                os.replace(path + ".tmp", path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
