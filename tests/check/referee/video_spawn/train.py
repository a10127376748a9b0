"""Predict the next frames of small videos with a ConvLSTM; processes are started with mp.spawn.

    python train.py [--processes 2]

Scheduled sampling: in training, the input of a frame is the true previous frame with a probability that falls with the step, else
the model's own prediction. Training stops when the validation loss no longer improves enough; starting again goes on from
last.pt, with new patience.
"""
import argparse
import os
import random
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_videos(n, n_frames=7, size=10, seed=0):
    """Two soft balls which fly over the picture and come back on the other side."""
    g = torch.Generator().manual_seed(seed)
    place, speed = size * torch.rand(n, 2, 2, generator=g), torch.randint(-1, 2, (n, 2, 2), generator=g)
    t, grid = torch.arange(n_frames).view(1, -1, 1, 1), torch.arange(size)
    d = (grid - (place[:, None] + speed[:, None] * t)[..., None] + size / 2) % size - size / 2  # [n, t, ball, y or x, size]
    ball = (-(d[..., 0, :, None] ** 2 + d[..., 1, None, :] ** 2) / 3).exp()
    return ball.amax(2, keepdim=True)  # [n, t, 1, size, size]


class Frames(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.width = width
        self.gates = nn.Conv2d(1 + width, 4 * width, 5, padding=2, padding_mode="circular")
        self.out = nn.Conv2d(width, 1, 3, padding=1, padding_mode="circular")

    def forward(self, video, p_true, n_seen=3):
        """Scores of frames 1, 2, ...; the first n_seen frames are always the true ones, later ones with probability p_true."""
        n, n_frames, _, height, width = video.shape
        h = c = video.new_zeros(n, self.width, height, width)
        scores = []
        for t in range(n_frames - 1):
            x = video[:, t]
            if t >= n_seen:
                true = (torch.rand(n, 1, 1, 1, device=x.device) < p_true).float()
                x = true * x + (1 - true) * scores[-1].detach().sigmoid()
            i, f, o, new = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
            c = (f + 1).sigmoid() * c + i.sigmoid() * new.tanh()
            h = o.sigmoid() * c.tanh()
            scores.append(self.out(h))
        return torch.stack(scores, 1)


@torch.no_grad()
def evaluate(net, loader, device):
    """Loss of predictions without any true frame after the first ones, over the videos of all processes."""
    net.eval()
    total = torch.zeros(2, device=device)
    for video, in loader:
        video = video.to(device)
        total[0] += F.binary_cross_entropy_with_logits(net(video, 0.0), video[:, 1:]) * len(video)
        total[1] += len(video)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def save(state, path):
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def train(rank, args, port):
    on_gpu = torch.cuda.device_count() >= args.processes
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=args.processes, timeout=timedelta(minutes=5))
    world = dist.get_world_size()
    assert args.batch_size % world == 0, f"--batch-size has to be divisible by {world}"

    torch.manual_seed(args.seed)
    random.seed(args.seed)
    videos = TensorDataset(make_videos(296, seed=args.seed))
    order = random.sample(range(len(videos)), len(videos))  # the same on all processes
    train_set, val_set = Subset(videos, order[56:]), Subset(videos, order[:56])
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=16)

    model = DDP(Frames().to(device), device_ids=[rank] if on_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    first_epoch, step, best, bad = 0, 0, float("inf"), 0
    last_file = args.out / "last.pt"
    if last_file.exists():
        state = torch.load(last_file, map_location=device)
        model.module.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, step, best = state["epoch"] + 1, state["step"], state["best"]

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + 1000 * (epoch + 1) + rank)  # other coins on each process, the same after a resume
        model.train()
        loss_sum = torch.zeros((), device=device)
        for video, in loader:
            video = video.to(device)
            p_true = max(0.0, 1.0 - step / args.sampling_steps)
            loss = F.binary_cross_entropy_with_logits(model(video, p_true), video[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        val_loss = evaluate(model.module, val_loader, device)
        if rank == 0:
            bad = 0 if val_loss < best - args.min_delta else bad + 1
            print(f"epoch {epoch}  train loss {loss_sum.item() / (world * len(loader)):.4f}  validation loss {val_loss:.4f}"
                  f"  p_true {p_true:.2f}  bad epochs {bad}", flush=True)
        best = min(best, val_loss)
        if rank == 0:
            save({"net": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step,
                  "best": best}, last_file)
            if val_loss == best:
                save(model.module.state_dict(), args.out / "best.pt")
        stop = torch.tensor(float(bad > args.patience), device=device)
        dist.broadcast(stop, 0)  # rank 0 decides for all
        if stop:
            break
    if rank == 0:
        print(f"best validation loss {best:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--processes", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--patience", type=int, default=0)
    parser.add_argument("--min-delta", type=float, default=0.01)
    parser.add_argument("--batch-size", type=int, default=24, help="videos in one step, over all processes")
    parser.add_argument("--sampling-steps", type=int, default=40, help="steps until no true frames are left")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(train, args=(args, port), nprocs=args.processes)


if __name__ == "__main__":
    main()
