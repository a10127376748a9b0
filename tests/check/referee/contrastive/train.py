"""SimCLR-style pretraining with negatives from all GPUs:  torchrun --nproc-per-node=2 train.py [--resume FILE]"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoViews(Dataset):
    def __init__(self, n, seed, classes=10):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (n,), generator=g)
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        angle = (self.labels * math.pi / classes)[:, None, None]
        waves = torch.sin(x * angle.cos() + y * angle.sin() + 2 * math.pi * torch.rand(n, 1, 1, generator=g))
        self.images = (waves + 0.7 * torch.randn(n, 16, 16, generator=g)).unsqueeze(1)

    def __len__(self):
        return len(self.labels)

    def augment(self, image):
        top, left = torch.randint(5, (2,)).tolist()
        return (0.6 + 0.8 * torch.rand(())) * image[:, top:top + 12, left:left + 12] + 0.3 * torch.randn(1, 12, 12)

    def __getitem__(self, index):
        return self.augment(self.images[index]), self.augment(self.images[index])


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 5, stride=2), nn.GroupNorm(4, 16), nn.ReLU(),
                                     nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projector = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)).float(), dim=1)


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def nt_xent(z1, z2, temperature=0.2):
    all1, all2 = AllGather.apply(z1), AllGather.apply(z2)
    labels = torch.arange(len(z1), device=z1.device) + dist.get_rank() * len(z1)
    itself = F.one_hot(labels, len(all1)) * 1e9
    from_1 = torch.cat([z1 @ all2.T, z1 @ all1.T - itself], dim=1) / temperature
    from_2 = torch.cat([z2 @ all1.T, z2 @ all2.T - itself], dim=1) / temperature
    return (F.cross_entropy(from_1, labels) + F.cross_entropy(from_2, labels)) / 2


@torch.no_grad()
def centroid_accuracy(encoder, dataset, shard, device, classes=10):
    images, labels = dataset.images[shard].to(device), dataset.labels[shard].to(device)
    features = F.normalize(encoder(images), dim=1)
    centroids = torch.zeros(classes, features.size(1), device=device).index_add_(0, labels, features)
    dist.all_reduce(centroids)
    hits = ((features @ F.normalize(centroids, dim=1).T).argmax(1) == labels).sum()
    dist.all_reduce(hits)
    return hits.item() / len(dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="per GPU")
    parser.add_argument("--base-lr", type=float, default=0.3, help="for a global batch of 256")
    parser.add_argument("--resume", default="")
    parser.add_argument("--save-to", default="checkpoints/simclr.pt")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)
    train_set, test_set = TwoViews(768, seed=1), TwoViews(300, seed=2)
    loader = DataLoader(train_set, args.batch, sampler=DistributedSampler(train_set, drop_last=True), drop_last=True)
    net = SimCLR().to(device)
    optimizer = torch.optim.SGD(net.parameters(), args.base_lr * args.batch * world_size / 256, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    parts, first_epoch = {"net": net, "optimizer": optimizer, "scheduler": scheduler}, 0
    if args.resume:
        state = torch.load(args.resume, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first_epoch = state["epoch"] + 1
    model = DDP(net, device_ids=[local_rank])
    for epoch in range(first_epoch, args.epochs):
        loader.sampler.set_epoch(epoch)
        torch.manual_seed(1 + epoch * world_size + rank)  # other augmentations on every rank
        total = torch.zeros((), device=device)
        for view1, view2 in loader:
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                z1, z2 = model(torch.cat([view1, view2]).to(device)).chunk(2)
            loss = nt_xent(z1, z2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.detach()
        dist.all_reduce(total)
        accuracy = centroid_accuracy(net.encoder, test_set, slice(rank, None, world_size), device)
        if rank == 0:
            print(f"epoch {epoch}: loss {total / world_size / len(loader):.4f}, accuracy {accuracy:.4f}", flush=True)
            os.makedirs(os.path.dirname(args.save_to) or ".", exist_ok=True)
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "epoch": epoch}, args.save_to + ".tmp")
            os.replace(args.save_to + ".tmp", args.save_to)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
