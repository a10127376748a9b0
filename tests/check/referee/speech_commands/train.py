"""Spoken-command classifier on synthetic waveforms: log-mel, small DDP CNN, label smoothing, top-k accuracy, early stopping.

A second start with the same arguments loads --out/last.pt and trains what is left up to --epochs (nothing if the run was done
or had stopped early). The best weights by validation loss are kept in --out/best.pt.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RATE, LENGTH, CLASSES = 4000, 2048, 8


def make_recordings(per_class, seed):
    """Waveforms in the order of the folders, one class after the other: each command glides from pitch to pitch."""
    g = torch.Generator().manual_seed(seed)
    n = per_class * CLASSES
    labels = torch.arange(CLASSES).repeat_interleave(per_class)
    voice = 0.93 + 0.14 * torch.rand(n, 1, generator=g)  # pitch of the speaker
    low, high, last = 250 + 110 * (labels % 4), 250 + 170 * (labels % 3), 300 + 250 * (labels // 3)
    start, middle, end = (x[:, None] * voice for x in (low, high, last))
    onset = 0.25 * torch.rand(n, 1, generator=g)
    t = (torch.arange(LENGTH) / LENGTH - onset).clamp(min=0)
    pitch = torch.where(t < 0.35, start + (middle - start) * t / 0.35, end)
    phase = 2 * math.pi * torch.cumsum(pitch, 1) / RATE
    sound = (torch.sin(phase) + 0.5 * torch.sin(2 * phase)) * torch.exp(-3 * t) * (t > 0)
    loudness = 0.3 + 1.4 * torch.rand(n, 1, generator=g)
    return TensorDataset(loudness * sound + 0.2 * torch.randn(n, LENGTH, generator=g), labels)


class LogMel(nn.Module):
    """Log-mel spectrogram; normalize() sets mean and scale of each band."""

    def __init__(self, n_fft=256, hop=64, bands=32):
        super().__init__()
        self.n_fft, self.hop, self.mean, self.std = n_fft, hop, 0.0, 1.0
        mel = torch.linspace(math.log1p(60 / 200), math.log1p(1900 / 200), bands + 2)
        edges = 200 * torch.expm1(mel)[:, None]
        f = torch.linspace(0, RATE / 2, n_fft // 2 + 1)
        up, down = (f - edges[:-2]) / (edges[1:-1] - edges[:-2]), (edges[2:] - f) / (edges[2:] - edges[1:-1])
        self.register_buffer("filters", torch.minimum(up, down).clamp(min=0), persistent=False)
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)

    def forward(self, wave):
        power = torch.stft(wave, self.n_fft, self.hop, window=self.window, return_complex=True).abs().square()
        return (torch.log(self.filters @ power + 1e-3) - self.mean) / self.std


class CommandNet(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        layers, last = [], 1
        for channels in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(last, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]
            last = channels
        self.body, self.head = nn.Sequential(*layers), nn.Sequential(nn.Dropout(0.2), nn.Linear(last, CLASSES))

    def forward(self, spectrogram):
        return self.head(self.body(spectrogram[:, None]).mean(dim=(2, 3)))


class EarlyStopping:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta, self.best, self.bad = patience, min_delta, float("inf"), 0

    def update(self, value):
        improved = value < self.best - self.min_delta
        self.best, self.bad = (value, 0) if improved else (self.best, self.bad + 1)
        return improved

    def done(self):
        return self.bad >= self.patience


@torch.no_grad()
def fit_front_end(front, data, rank, world, device):
    """Mean and deviation of each band over the whole training set; every rank reads its part of the files."""
    part = torch.arange(len(data)).tensor_split(world)[rank]
    sums = torch.zeros(3, front.filters.shape[0], dtype=torch.double, device=device)
    for rows in part.split(256):
        mel = front(data.tensors[0][rows].to(device)).double()
        sums += torch.stack([mel.sum((0, 2)), mel.square().sum((0, 2)), torch.full_like(sums[0], mel[:, 0].numel())])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    front.mean, front.std = mean[:, None].float(), (sums[1] / sums[2] - mean ** 2).sqrt()[:, None].float()


@torch.no_grad()
def evaluate(model, front, loader, device, k=3):
    """Loss, top-1 and top-k accuracy over all recordings of all ranks."""
    model.eval()
    for name, buffer in model.named_buffers():  # batch norm: the mean of what the ranks have seen
        if "running" in name:
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
    sums = torch.zeros(4, dtype=torch.double, device=device)
    for wave, label in loader:
        label = label.to(device)
        logits = model(front(wave.to(device)))
        hit = logits.topk(k).indices == label[:, None]
        sums[:3] += torch.stack([F.cross_entropy(logits, label, reduction="sum"), hit[:, 0].sum(), hit.sum()])
        sums[3] += len(label)
    dist.all_reduce(sums)
    model.train()
    return (sums[:3] / sums[3]).tolist()


def save(state, path):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=36, help="recordings per step over all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--patience", type=int, default=1)
    parser.add_argument("--min-delta", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    seed = args.seed + rank  # dropout and augmentation differ between the ranks

    train_set, val_set = make_recordings(225, seed=1), make_recordings(60, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch // world, sampler=sampler, drop_last=True, pin_memory=cuda)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=128, pin_memory=cuda)

    front = LogMel().to(device)
    fit_front_end(front, train_set, rank, world, device)
    torch.manual_seed(args.seed)
    model = CommandNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    stopping = EarlyStopping(args.patience, args.min_delta)

    path, first = os.path.join(args.out, "last.pt"), 0
    if os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        stopping.best, stopping.bad = state["best"], state["bad"]
        first = args.epochs if stopping.done() else state["epoch"] + 1
    ddp = DDP(model, device_ids=[device.index] if cuda else None)

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(seed + 1000 * (epoch + 1))
        total = torch.zeros((), device=device)
        for wave, label in train_loader:
            wave, label = wave.to(device, non_blocking=True), label.to(device, non_blocking=True)
            shift = int(torch.randint(-200, 201, ()))
            wave = wave.roll(shift, dims=1) * (0.7 + 0.6 * torch.rand(len(wave), 1, device=device))
            loss = F.cross_entropy(ddp(front(wave)), label, label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.detach() / len(train_loader)
        dist.all_reduce(total)

        val_loss, top1, top3 = evaluate(model, front, val_loader, device)
        improved = stopping.update(val_loss)
        if rank == 0:
            print(f"epoch {epoch}: train loss {total.item() / world:.4f}, val loss {val_loss:.4f}, top-1 {top1:.4f}, "
                  f"top-3 {top3:.4f}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            if improved:
                save({"model": model.state_dict(), "mean": front.mean, "std": front.std}, os.path.join(args.out, "best.pt"))
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                  "best": stopping.best, "bad": stopping.bad, "epoch": epoch}, path)
        if stopping.done():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
