"""Self-supervised training on small images from two views (BYOL: student, predictor, EMA teacher), judged by k-NN.

Cosine rate and momentum per step, synchronised batch norm, features for the k-NN gathered from all ranks.
A second start with the same arguments loads the newest checkpoint in --out and trains what is left up to --epochs.
"""
import argparse
import copy
import glob
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SIZE, CLASSES = 20, 9


def make_images(n, seed):
    """Gratings of three kinds and three widths in random colours, lit from a random side, with noise; labels 0 to 8."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (n,), generator=g)
    y, x = torch.meshgrid(torch.arange(SIZE) - 9.5, torch.arange(SIZE) - 9.5, indexing="ij")
    width = torch.tensor([0.7, 1.2, 1.9])[labels // 3].view(n, 1, 1) * (0.9 + 0.2 * torch.rand(n, 1, 1, generator=g))
    a, b = 6.28 * torch.rand(2, n, 1, 1, generator=g)
    kinds = torch.stack([torch.sin(width * x + a), torch.sin(width * y + b), torch.sin(width * x + a) * torch.sin(width * y + b)])
    slope = 0.16 * torch.rand(2, n, 1, 1, generator=g) - 0.08
    image = kinds[labels % 3, torch.arange(n)] + 2 * (slope[0] * x + slope[1] * y) + 0.6 * torch.randn(n, SIZE, SIZE, generator=g)
    return TensorDataset(image[:, None] * (0.4 + 0.6 * torch.rand(n, 3, 1, 1, generator=g)), labels)


def view(images, g):
    """A random crop of each image, mirrored or not, with other brightness, other colours and noise."""
    n, device = len(images), images.device
    scale = 0.75 + 0.25 * torch.rand(n, generator=g, device=device)
    mirror = 2 * torch.randint(0, 2, (n,), generator=g, device=device) - 1
    shift = (1 - scale) * (2 * torch.rand(2, n, generator=g, device=device) - 1)
    zero = torch.zeros_like(scale)
    theta = torch.stack([torch.stack([scale * mirror, zero, shift[0]], 1), torch.stack([zero, scale, shift[1]], 1)], 1)
    out = F.grid_sample(images, F.affine_grid(theta, list(images.shape), align_corners=False), align_corners=False)
    gain = 0.5 + torch.rand(n, 3, 1, 1, generator=g, device=device)
    return out.mean(1, keepdim=True) * gain + 0.05 * torch.randn(out.shape, generator=g, device=device)


def mlp(inner, outer):
    return nn.Sequential(nn.Linear(96, inner, bias=False), nn.BatchNorm1d(inner), nn.ReLU(), nn.Linear(inner, outer))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layers, last = [], 3
        for channels in (24, 48, 96):
            stride = 1 if last == 3 else 2
            layers += [nn.Conv2d(last, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
            last = channels
        self.backbone, self.projector = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), mlp(192, 96)

    def forward(self, x):
        return self.projector(self.backbone(x))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = Encoder(), mlp(192, 96)

    def forward(self, x):
        return self.predictor(self.encoder(x))


@torch.no_grad()
def update_teacher(teacher, encoder, momentum):
    for slow, fast in zip(teacher.parameters(), encoder.parameters()):
        slow.lerp_(fast, 1 - momentum)
    for slow, fast in zip(teacher.buffers(), encoder.buffers()):
        slow.copy_(fast)


def average_running_stats(model):
    """Without SyncBatchNorm (CPU) every rank has seen other batches: use the mean over the ranks."""
    for name, buffer in model.named_buffers():
        if "running" in name:
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()


def gather_rows(part, n):
    """All n rows in their first order, from parts of which rank r holds the rows r, r + world, r + 2 * world, ..."""
    world = dist.get_world_size()
    part = F.pad(part, (0, 0, 0, math.ceil(n / world) - len(part)))
    parts = [torch.empty_like(part) for _ in range(world)]
    dist.all_gather(parts, part)
    return torch.stack(parts, dim=1).flatten(0, 1)[:n]


@torch.no_grad()
def knn_accuracy(encoder, bank, test, device, k=10):
    """Accuracy of a vote of the k nearest training images; features and queries are split over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    encoder.eval()
    part, query = (torch.cat([F.normalize(encoder.backbone(x.to(device)), dim=1) for x in s.tensors[0][rank::world].split(200)])
                   for s in (bank, test))
    encoder.train()
    features, labels = gather_rows(part, len(bank)), bank.tensors[1].to(device)
    near = (query @ features.t()).topk(k)
    votes = torch.zeros(len(query), CLASSES, device=device).scatter_add_(1, labels[near.indices], torch.exp(near.values / 0.1))
    hits = (votes.argmax(1) == test.tensors[1][rank::world].to(device)).sum()
    dist.all_reduce(hits)
    return hits.item() / len(test)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=60, help="images per step over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--keep", type=int, default=1, help="checkpoints to keep")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed + rank)

    data, test = make_images(2400, seed=1), make_images(500, seed=2)
    sampler = DistributedSampler(data, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler, drop_last=True, pin_memory=cuda)

    student = Student().to(device)
    if cuda:  # SyncBatchNorm does not exist for the CPU
        student = nn.SyncBatchNorm.convert_sync_batchnorm(student)
    student_ddp = DDP(student, device_ids=[device.index] if cuda else None)
    teacher = copy.deepcopy(student.encoder).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=1e-3)

    step, first = 0, 0
    found = sorted(glob.glob(os.path.join(args.out, "epoch_*.pt")))
    if found:
        state = torch.load(found[-1], map_location=device)
        student.load_state_dict(state["student"])
        teacher.load_state_dict(state["teacher"])
        optimizer.load_state_dict(state["optimizer"])
        step, first = state["step"], state["epoch"] + 1

    total = args.epochs * len(loader)
    g = torch.Generator(device)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        g.manual_seed(args.seed + 10_000 * (epoch + 1) + rank)  # other views on every rank and in every epoch
        mean_loss = torch.zeros((), device=device)
        for images, _ in loader:
            images = images.to(device, non_blocking=True)
            done = 0.5 * (1 - math.cos(math.pi * step / total))  # from 0 to 1
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, (step + 1) / args.warmup) * (1 - done)
            views = torch.cat([view(images, g), view(images, g)])
            with torch.no_grad():
                target = teacher(views)
            target = torch.cat(target.chunk(2)[::-1])  # each view predicts the other one
            loss = 1 - F.cosine_similarity(student_ddp(views), target).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            update_teacher(teacher, student.encoder, momentum=0.98 + 0.02 * done)
            mean_loss += loss.detach() / len(loader)
            step += 1
        dist.all_reduce(mean_loss)

        average_running_stats(student)
        for slow, fast in zip(teacher.buffers(), student.encoder.buffers()):
            slow.copy_(fast)
        accuracy = knn_accuracy(teacher, data, test, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean_loss.item() / world:.4f}, k-NN accuracy {accuracy:.4f}, "
                  f"lr {optimizer.param_groups[0]['lr']:.2e}", flush=True)
            os.makedirs(args.out, exist_ok=True)
            path = os.path.join(args.out, f"epoch_{epoch:03d}.pt")
            torch.save({"student": student.state_dict(), "teacher": teacher.state_dict(), "optimizer": optimizer.state_dict(),
                        "step": step, "epoch": epoch}, path + ".tmp")
            os.replace(path + ".tmp", path)
            if epoch >= args.keep:
                os.remove(os.path.join(args.out, f"epoch_{epoch - args.keep:03d}.pt"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
