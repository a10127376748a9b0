"""Mean teacher, few labels:  torchrun --nproc-per-node=2 train.py  (goes on from the checkpoint in --out, if any)"""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels, t = torch.randint(6, (n,), generator=g), torch.rand(n, generator=g)
    angle = (labels + 1.2 * t) * math.pi / 3  # six spiral arms
    points = (1 + 2 * t)[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return TensorDataset(F.pad(points, (0, 10)) + 0.15 * torch.randn(n, 12, generator=g), labels)


def make_model(width=64):
    return nn.Sequential(nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(),
                         nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 6))


def endless(loader, epoch):
    passes = 0
    while True:
        loader.sampler.set_epoch(1000 * epoch + passes)
        yield from loader
        passes += 1


@torch.no_grad()
def average_buffers(model, world_size):
    """Every rank has seen other samples: give all of them the mean BatchNorm statistics."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= world_size


@torch.no_grad()
def update_teacher(teacher, student, step, max_decay):
    decay = min(max_decay, 1 - 1 / (step + 1))
    for old, new in zip(teacher.state_dict().values(), student.state_dict().values()):
        if old.is_floating_point():
            old.lerp_(new, 1 - decay)
        else:
            old.copy_(new)


@torch.no_grad()
def accuracy(model, loader, device):
    counts = torch.zeros(2, device=device)
    for x, y in loader:
        counts += torch.tensor([(model(x.to(device)).argmax(1) == y.to(device)).sum(), len(y)], device=device)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--ema-decay", type=float, default=0.97)
    parser.add_argument("--consistency", type=float, default=5.0)
    parser.add_argument("--ramp-up", type=int, default=30, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    labelled, unlabelled, val_set = make_data(96, 1), make_data(768, 2), make_data(300, 3)
    labelled_loader, unlabelled_loader = (
        DataLoader(dataset, size, sampler=DistributedSampler(dataset, seed=args.seed, drop_last=True), drop_last=True)
        for dataset, size in ((labelled, 16), (unlabelled, 32)))
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 64)
    student = DDP(make_model().to(device), device_ids=[device.index] if cuda else None)
    teacher = copy.deepcopy(student.module).requires_grad_(False).eval()
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    path, first_epoch, step = os.path.join(args.out, "last.pt"), 0, 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device, weights_only=True)
        student.module.load_state_dict(state["student"])
        teacher.load_state_dict(state["teacher"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, step = state["epoch"] + 1, state["step"]

    for epoch in range(first_epoch, args.epochs):
        torch.manual_seed(args.seed + 1 + epoch * world_size + rank)  # noise of the augmentation
        unlabelled_loader.sampler.set_epoch(epoch)
        student.train()
        totals = torch.zeros(3, device=device)
        for (u, _), (x, y) in zip(unlabelled_loader, endless(labelled_loader, epoch)):
            x, y, u = x.to(device), y.to(device), u.to(device)
            views = [batch + 0.1 * torch.randn_like(batch) for batch in (x, u, u)]
            logits = student(torch.cat(views[:2]))
            target = teacher(views[2]).softmax(1)
            class_loss = F.cross_entropy(logits[:len(x)], y)
            consistency_loss = F.mse_loss(logits[len(x):].softmax(1), target)
            weight = args.consistency * math.exp(-5 * (1 - min(1.0, step / args.ramp_up)) ** 2)
            optimizer.zero_grad()
            (class_loss + weight * consistency_loss).backward()
            optimizer.step()
            average_buffers(student.module, world_size)
            update_teacher(teacher, student.module, step, args.ema_decay)
            step += 1
            totals += torch.stack([class_loss.detach(), consistency_loss.detach(), torch.ones_like(class_loss)])
        dist.all_reduce(totals)
        scores = accuracy(student.module.eval(), val_loader, device), accuracy(teacher, val_loader, device)
        if rank == 0:
            losses = "class loss {:.4f}, consistency loss {:.4f}".format(*(totals[:2] / totals[2]).tolist())
            print(f"epoch {epoch}: {losses}, accuracy of student {scores[0]:.4f}, teacher {scores[1]:.4f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            torch.save({"student": student.module.state_dict(), "teacher": teacher.state_dict(), "step": step,
                        "optimizer": optimizer.state_dict(), "epoch": epoch}, path + ".tmp")
            os.replace(path + ".tmp", path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
