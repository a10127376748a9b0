"""Train an image classifier the way the big ImageNet scripts do, here on small synthetic images.

    torchrun --standalone --nproc-per-node=2 train.py

A run that was cut off goes on from OUTPUT/last.pt when it is started again with the same command.
"""
import argparse
import contextlib
import copy
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
    parser.add_argument("-b", "--batch-size", type=int, default=32, help="images per GPU and micro-batch")
    parser.add_argument("--grad-accum-steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip-grad", type=float, default=2.0)
    parser.add_argument("--mixup", type=float, default=0.2, help="alpha of the Beta distribution")
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--model-ema-decay", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", default="output")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


class SyntheticImages(Dataset):
    def __init__(self, size, seed, train, num_classes=20):
        textures = torch.randn(num_classes, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        g = torch.Generator().manual_seed(seed)
        self.train, self.labels = train, torch.randint(num_classes, (size,), generator=g)
        self.images = 0.22 * textures[self.labels] + torch.randn(size, 3, 16, 16, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].clone()
        if self.train:  # random erasing
            y, x = torch.randint(0, 12, (2,)).tolist()
            image[:, y:y + 4, x:x + 4] = 0
        return image, self.labels[index]


def create_model(num_classes=20, width=16):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.Flatten(), nn.Linear(2 * width * 4 * 4, num_classes))


class ModelEma:
    """Moving average of the weights and buffers; the decay rises to its final value with the number of updates."""

    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model, num_updates):
        decay = min(self.decay, 1 - (num_updates + 1) ** (-2 / 3))
        for ours, theirs in zip(self.module.state_dict().values(), model.state_dict().values()):
            ours.lerp_(theirs, 1 - decay) if ours.is_floating_point() else ours.copy_(theirs)


def mixup(images, labels, alpha, smoothing, num_classes=20):
    targets = F.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes
    lam = torch.distributions.Beta(alpha, alpha).sample().item()
    return lam * images + (1 - lam) * images.flip(0), lam * targets + (1 - lam) * targets.flip(0)


@torch.no_grad()
def distribute_bn(model):
    """Every rank has seen other images: average the running statistics of batch norm over the ranks."""
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


class Meter:
    """Averages of several values over all examples of all ranks."""

    def __init__(self, names, device):
        self.names, self.totals = names, torch.zeros(len(names) + 1, dtype=torch.float64, device=device)

    def update(self, values, n):
        self.totals[:-1] += torch.stack(values).detach() * n
        self.totals[-1] += n

    def compute(self):
        dist.all_reduce(self.totals)
        return dict(zip(self.names, (self.totals[:-1] / self.totals[-1]).tolist()))


def train_one_epoch(model, ema, loader, optimizer, scheduler, num_updates, args, device):
    model.train()
    meter = Meter(["loss"], device)
    accum_steps, last_batch = args.grad_accum_steps, len(loader) - 1
    last_accum_steps = len(loader) % accum_steps or accum_steps
    for i, (images, labels) in enumerate(loader):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        images, targets = mixup(images, labels, args.mixup, args.smoothing)
        need_update = i == last_batch or (i + 1) % accum_steps == 0
        group_size = last_accum_steps if i > last_batch - last_accum_steps else accum_steps
        with contextlib.nullcontext() if need_update else model.no_sync():
            loss = F.cross_entropy(model(images), targets)
            (loss / group_size).backward()
        meter.update([loss], len(images))
        if need_update:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            num_updates += 1
            ema.update(model.module, num_updates)
    return num_updates, meter.compute()


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    meter = Meter(["top1", "top5"], device)
    for images, labels in loader:
        hits = model(images.to(device)).topk(5, dim=1).indices == labels.to(device).unsqueeze(1)
        meter.update([100 * hits[:, :k].any(dim=1).double().mean() for k in (1, 5)], len(labels))
    return meter.compute()


def main():
    args = get_args()
    use_cuda, local_rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, val_set = SyntheticImages(1280, args.seed, True), SyntheticImages(501, args.seed + 1, False)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, pin_memory=use_cuda, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 64, pin_memory=use_cuda)

    torch.manual_seed(args.seed)
    net = create_model().to(device)
    ema = ModelEma(net, args.model_ema_decay)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    updates_per_epoch = math.ceil(len(train_loader) / args.grad_accum_steps)
    warmup, total = args.warmup_epochs * updates_per_epoch, args.epochs * updates_per_epoch

    def lr_factor(update):
        if update < warmup:
            return (update + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - warmup) / max(1, total - warmup))))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    start_epoch, num_updates, best_top1 = 0, 0, -1.0
    last, best = (os.path.join(args.output, name) for name in ("last.pt", "best.pt"))
    if args.resume and os.path.exists(last):
        checkpoint = torch.load(last, map_location=device)
        net.load_state_dict(checkpoint["model"])
        ema.module.load_state_dict(checkpoint["model_ema"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start_epoch, num_updates, best_top1 = (checkpoint[k] for k in ("next_epoch", "num_updates", "best_top1"))
    model = DDP(net, device_ids=[local_rank] if use_cuda else None)

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + 1000 * epoch + rank)  # augmentation and mixup of the rank's own
        num_updates, train = train_one_epoch(model, ema, train_loader, optimizer, scheduler, num_updates, args, device)
        distribute_bn(net)
        distribute_bn(ema.module)
        val = validate(ema.module, val_loader, device)
        is_best, best_top1 = val["top1"] > best_top1, max(val["top1"], best_top1)
        if rank == 0:
            print(f"epoch {epoch}: train loss {train['loss']:.4f}, ema top-1 {val['top1']:.2f}, "
                  f"top-5 {val['top5']:.2f} (best {best_top1:.2f})", flush=True)
            os.makedirs(args.output, exist_ok=True)
            if is_best:
                torch.save({"model": ema.module.state_dict(), "epoch": epoch, **val}, best)
            torch.save({"model": net.state_dict(), "model_ema": ema.module.state_dict(),
                        "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                        "next_epoch": epoch + 1, "num_updates": num_updates, "best_top1": best_top1}, last + ".tmp")
            os.replace(last + ".tmp", last)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
