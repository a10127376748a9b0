"""Knowledge distillation for short sounds with Lightning Fabric: a wide teacher (trained once by rank 0) teaches a small student under DDP.

    torchrun --nproc-per-node=2 train.py
"""
import argparse
import os

import lightning.fabric as lf
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

CLASSES, LENGTH = 8, 256


class Sounds(Dataset):
    """Barks: each class has a pitch and a glide, with random phase, loudness and noise. With epoch set, they are shifted and scaled at random."""

    def __init__(self, n, seed, augment=False):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, CLASSES, (n,), generator=g)
        t = torch.linspace(0, 1, LENGTH)
        pitch = 12 + 3.0 * (self.label % 4)[:, None] + torch.randn(n, 1, generator=g)
        glide = 8.0 * (self.label // 4)[:, None] - 4 + 1.5 * torch.randn(n, 1, generator=g)
        phase, fade = 6.28 * torch.rand(n, 1, generator=g), 1 + 4 * torch.rand(n, 1, generator=g)
        clean = torch.sin(6.2832 * (pitch * t + glide * t ** 2) + phase) * torch.exp(-fade * t)
        self.wave = clean + 0.35 * torch.randn(n, LENGTH, generator=g)
        self.augment, self.epoch = augment, 0

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        wave = self.wave[i]
        if self.augment:  # numbers of this epoch and sound, whichever process asks for it
            g = torch.Generator().manual_seed(1_000_003 * (self.epoch + 1) + i)
            wave = wave.roll(int(torch.randint(-20, 21, (), generator=g))) * (0.7 + 0.6 * torch.rand((), generator=g))
        return wave[None], self.label[i]


class ShardedOrder(Sampler):
    """The permutation of an epoch, of which each process takes every world-th entry."""

    def __init__(self, n, rank, world, seed):
        self.n, self.rank, self.world, self.seed, self.epoch = n, rank, world, seed, 0

    def __len__(self):
        return self.n // self.world

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + 31 * self.epoch))
        return iter(order[self.rank::self.world][:len(self)].tolist())


def make_teacher():
    return nn.Sequential(nn.Conv1d(1, 32, 9, 2, 4), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2),
                         nn.Conv1d(32, 48, 9, 4, 4), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2),
                         nn.Conv1d(48, 64, 5, 2, 2), nn.BatchNorm1d(64), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(),
                         nn.Dropout(0.4), nn.Linear(256, CLASSES))


def make_student():
    return nn.Sequential(nn.Conv1d(1, 8, 9, 4, 4), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv1d(8, 16, 9, 4, 4), nn.GroupNorm(2, 16), nn.ReLU(),
                         nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, CLASSES))


def train_teacher(data, steps=120):
    torch.manual_seed(77)
    teacher = make_teacher()
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(steps):
        pick = torch.randint(0, len(data), (64,))
        loss = F.cross_entropy(teacher(data.wave[pick, None]), data.label[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher.state_dict()


def distill_loss(student, teacher, label, temperature, alpha):
    soft = F.kl_div(F.log_softmax(student / temperature, 1), F.log_softmax(teacher / temperature, 1), reduction="batchmean", log_target=True)
    return alpha * temperature ** 2 * soft + (1 - alpha) * F.cross_entropy(student, label)


@torch.no_grad()
def evaluate(fabric, student, teacher, loader):
    """Accuracy of the student, accuracy of the teacher, and how often they agree, over all sounds."""
    student.eval()
    counts = torch.zeros(4, device=fabric.device)
    for wave, label in loader:
        mine, his = student(wave).argmax(1), teacher(wave).argmax(1)
        counts += torch.stack([(mine == label).sum(), (his == label).sum(), (mine == his).sum(), label.new_tensor(len(label))])
    counts = fabric.all_reduce(counts, reduce_op="sum")
    student.train()
    return (counts[:3] / counts[3]).tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=96, help="sounds per step of all processes together")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--temperature", type=float, default=3.0)
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    fabric = lf.Fabric(accelerator="auto", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    rank, world = fabric.global_rank, fabric.world_size
    os.makedirs(args.out, exist_ok=True)

    train, val = Sounds(1170, seed=1, augment=True), Sounds(403, seed=2)
    teacher_path = os.path.join(args.out, "teacher.pt")
    if rank == 0 and not os.path.exists(teacher_path):
        torch.save(train_teacher(Sounds(600, seed=3)), teacher_path + ".tmp")
        os.replace(teacher_path + ".tmp", teacher_path)
    fabric.barrier()
    teacher = make_teacher()
    teacher.load_state_dict(torch.load(teacher_path))
    teacher.requires_grad_(False)
    teacher.eval()
    teacher.to(fabric.device)

    fabric.seed_everything(args.seed)
    size = args.batch // world
    order = ShardedOrder(len(train), rank, world, args.seed)
    loader = DataLoader(train, batch_size=size, sampler=order, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=128)
    loader, val_loader = fabric.setup_dataloaders(loader, val_loader, use_distributed_sampler=False)

    student = make_student()
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=1e-3)
    student, optimizer = fabric.setup(student, optimizer)
    total = args.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)

    state = {"model": student, "optimizer": optimizer, "scheduler": scheduler, "epoch": -1}
    path = os.path.join(args.out, "last.pt")
    if os.path.exists(path):
        fabric.load(path, state)
        fabric.print(f"resumed after epoch {state['epoch']}", flush=True)

    for epoch in range(state["epoch"] + 1, args.epochs):
        order.epoch = train.epoch = epoch
        running = torch.zeros((), device=fabric.device)
        for wave, label in loader:
            with torch.no_grad():
                target = teacher(wave)
            loss = distill_loss(student(wave), target, label, args.temperature, args.alpha)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(student, optimizer, max_norm=2.0)
            optimizer.step()
            scheduler.step()
            running += loss.detach() / len(loader)
        running = fabric.all_reduce(running, reduce_op="mean")
        accuracy, best, agree = evaluate(fabric, student, teacher, val_loader)
        fabric.print(f"epoch {epoch}: loss {running.item():.4f}, accuracy {accuracy:.4f} (teacher {best:.4f}), agreement {agree:.4f}, "
                     f"lr {scheduler.get_last_lr()[0]:.5f}", flush=True)
        state["epoch"] = epoch
        fabric.save(path + ".tmp", state)
        if fabric.is_global_zero:
            os.replace(path + ".tmp", path)
        fabric.barrier()


if __name__ == "__main__":
    main()
