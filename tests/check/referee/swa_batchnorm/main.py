"""Stochastic weight averaging of a small ResNet on synthetic shapes, with the BatchNorm statistics of the average refreshed.

python main.py            # all GPUs of this machine, or two CPU processes
python main.py --resume swa.ckpt
"""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def shapes(n, seed, size=14):
    """Disks, rings, squares, crosses and stripes, of any size, place and brightness."""
    g = torch.Generator().manual_seed(seed)
    u = lambda lo, hi: lo + (hi - lo) * torch.rand(n, 1, 1, generator=g)
    ys, xs = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    x, y, r = xs - u(-0.35, 0.35), ys - u(-0.35, 0.35), u(0.3, 0.65)
    d, box = (x**2 + y**2).sqrt(), torch.maximum(x.abs(), y.abs())
    kinds = torch.stack(
        [d < r, (d < r) & (d > 0.55 * r), box < 0.85 * r, (box < r) & ((x.abs() < 0.2) | (y.abs() < 0.2)),
         (d < r) & (torch.sin(14 * x) > 0)]
    ).float()
    label = torch.randint(len(kinds), (n,), generator=g)
    image = kinds[label, torch.arange(n)] * u(0.5, 1.5) + u(-0.3, 0.3) + 0.35 * torch.randn(n, size, size, generator=g)
    return TensorDataset(image[:, None], label)


class Block(nn.Module):
    def __init__(self, c_in, c, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c_in, c, 3, stride, 1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, 1, 1, bias=False), nn.BatchNorm2d(c)
        self.skip = nn.Identity() if c_in == c and stride == 1 else nn.Conv2d(c_in, c, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.skip(x) + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def resnet(width=12):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1), Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 5))


@torch.no_grad()
def merge_bn(model):
    """One mean and variance for the samples of all ranks, from those of each rank (equal numbers of samples)."""
    world = dist.get_world_size()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            mean, square = m.running_mean.clone(), m.running_var + m.running_mean**2
            dist.all_reduce(mean)
            dist.all_reduce(square)
            m.running_mean.copy_(mean / world)
            m.running_var.copy_(square / world - (mean / world) ** 2)


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    hits = torch.zeros(2, device=device)
    for x, y in loader:
        hits[0] += (model(x.to(device)).argmax(1) == y.to(device)).sum()
        hits[1] += len(y)
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def run(rank, world_size, port, args):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world_size)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    train_set, test_set = shapes(2048, 1), shapes(512, 2)
    sampler = DistributedSampler(train_set, world_size, rank, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, 128, sampler=DistributedSampler(test_set, world_size, rank, shuffle=False))

    torch.manual_seed(args.seed)
    net = resnet().to(device)
    ddp = nn.parallel.DistributedDataParallel(net, device_ids=[rank] if cuda else None)
    averaged = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs, eta_min=args.lr / 20)
    swa_schedule = SWALR(optimizer, swa_lr=args.swa_lr, anneal_epochs=2)
    first = 0
    if args.resume:
        ckpt = torch.load(args.resume, map_location=device)
        net.load_state_dict(ckpt["net"])
        averaged.load_state_dict(ckpt["averaged"])
        optimizer.load_state_dict(ckpt["optimizer"])
        cosine.load_state_dict(ckpt["cosine"])
        swa_schedule.load_state_dict(ckpt["swa_schedule"])
        first = ckpt["epoch"] + 1

    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        loss_sum = torch.zeros((), device=device)
        for x, y in train_loader:
            loss = F.cross_entropy(ddp(x.to(device)), y.to(device), label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        if epoch >= args.swa_start:
            averaged.update_parameters(net)
            swa_schedule.step()
        else:
            cosine.step()
        dist.all_reduce(loss_sum)
        acc = accuracy(ddp, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss_sum / len(train_loader) / world_size:.4f} test accuracy {acc:.4f}", flush=True)
            torch.save(
                {"net": net.state_dict(), "averaged": averaged.state_dict(), "optimizer": optimizer.state_dict(),
                 "cosine": cosine.state_dict(), "swa_schedule": swa_schedule.state_dict(), "epoch": epoch}, args.ckpt)
        dist.barrier()

    update_bn(train_loader, averaged, device=device)
    merge_bn(averaged)
    acc = accuracy(averaged, test_loader, device)
    if rank == 0:
        print(f"average of {int(averaged.n_averaged)} models: test accuracy {acc:.4f}")
        torch.save(averaged.module.state_dict(), "swa_final.pt")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--swa-start", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--swa-lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ckpt", default="swa.ckpt")
    parser.add_argument("--resume")
    args = parser.parse_args()
    world_size = torch.cuda.device_count() or 2
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    mp.spawn(run, args=(world_size, port, args), nprocs=world_size, join=True)


if __name__ == "__main__":
    main()
