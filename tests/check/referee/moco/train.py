"""Momentum contrast (MoCo): views of small textures against a queue of keys, judged by nearest neighbours.

    torchrun --nproc-per-node=2 train.py
"""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def make_textures(n, seed, size=16, classes=8):
    """Gratings whose direction and width tell the class; phase, colour and noise do not."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    angle, wave = (labels % 4) * math.pi / 4, 2 + 2 * (labels // 4)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    across = x * angle.cos().view(-1, 1, 1) + y * angle.sin().view(-1, 1, 1)
    phase = 2 * math.pi * torch.rand(n, 1, 1, generator=g)
    grating = torch.sin(2 * math.pi * wave.view(-1, 1, 1) * across / size + phase)
    colour = 0.4 + torch.rand(n, 3, 1, 1, generator=g)
    return colour * grating.unsqueeze(1) + 0.9 * torch.randn(n, 3, size, size, generator=g), labels


def random_view(image):
    dy, dx = torch.randint(-3, 4, (2,)).tolist()
    image = torch.roll(image, (dy, dx), dims=(1, 2)) * (0.6 + 0.8 * torch.rand(3, 1, 1))
    return image + 0.3 * torch.randn_like(image)


class TwoViews(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return random_view(self.images[i]), random_view(self.images[i])


def make_encoder(dim, width=16):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, dim),
    )


@torch.no_grad()
def concat_all_gather(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


class MoCo(nn.Module):
    def __init__(self, dim=32, queue_size=256, momentum=0.98, temperature=0.15):
        super().__init__()
        self.momentum, self.temperature = momentum, temperature
        self.encoder_q = make_encoder(dim)
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(queue_size, dim), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update_key_encoder(self):
        for k, q in zip(self.encoder_k.parameters(), self.encoder_q.parameters()):
            k.lerp_(q, 1 - self.momentum)

    @torch.no_grad()
    def encode_keys(self, images):
        """Own keys, from a batch mixed over all ranks: batch norm must not tell which key belongs to a query."""
        rank, n = dist.get_rank(), len(images)
        everyone = concat_all_gather(images)
        order = torch.randperm(len(everyone), device=images.device)
        dist.broadcast(order, src=0)
        mixed = everyone[order.view(-1, n)[rank]]
        keys = concat_all_gather(F.normalize(self.encoder_k(mixed), dim=1))
        return keys[torch.argsort(order).view(-1, n)[rank]]

    @torch.no_grad()
    def enqueue(self, keys):
        start, end = self.pointer.item(), self.pointer.item() + len(keys)
        assert end <= len(self.queue), "the queue must be a multiple of the global batch"
        self.queue[start:end] = keys
        self.pointer.fill_(end % len(self.queue))

    def forward(self, queries, keys):
        q = F.normalize(self.encoder_q(queries), dim=1)
        self.update_key_encoder()
        k = self.encode_keys(keys)
        positive = (q * k).sum(dim=1, keepdim=True)
        negative = q @ self.queue.clone().t()
        self.enqueue(concat_all_gather(k))
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


@torch.no_grad()
def nearest_neighbour_accuracy(encoder, bank, bank_labels, images, labels):
    """Every rank looks up the neighbours of its share of the test images."""
    encoder.eval()
    known = F.normalize(encoder(bank), dim=1)
    share = slice(dist.get_rank(), None, dist.get_world_size())
    found = bank_labels[(F.normalize(encoder(images[share]), dim=1) @ known.t()).argmax(dim=1)]
    counts = torch.stack([(found == labels[share]).sum(), torch.tensor(len(found), device=found.device)])
    dist.all_reduce(counts)
    encoder.train()
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=0.06)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="checkpoints/moco.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    use_cuda, local_rank = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    images, labels = make_textures(640, args.seed)
    test_images, test_labels = make_textures(300, args.seed + 1)
    dataset = TwoViews(images)
    sampler = DistributedSampler(dataset, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    moco = MoCo().to(device)
    model = DDP(moco, device_ids=[local_rank] if use_cuda else None)
    optimizer = torch.optim.SGD(moco.encoder_q.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    first_epoch = 0
    if args.resume and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location=device)
        moco.load_state_dict(state["moco"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + 1000 * epoch + rank)  # every rank makes views of its own
        for group in optimizer.param_groups:
            group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * epoch / args.epochs))
        total = torch.zeros((), device=device)
        for queries, keys in loader:
            loss = model(queries.to(device), keys.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        for buffer in moco.encoder_q.buffers():  # the running averages of batch norm are rank 0's, as in training
            dist.broadcast(buffer, src=0)
        accuracy = nearest_neighbour_accuracy(moco.encoder_q, images.to(device), labels.to(device),
                                              test_images.to(device), test_labels.to(device))
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / world_size:.3f}, 1-nn {accuracy:.3f}", flush=True)
            os.makedirs(os.path.dirname(args.checkpoint) or ".", exist_ok=True)
            torch.save({"moco": moco.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                       args.checkpoint + ".tmp")
            os.replace(args.checkpoint + ".tmp", args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
