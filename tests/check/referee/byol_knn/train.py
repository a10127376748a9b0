"""BYOL on synthetic textures with a kNN evaluation: torchrun --nproc-per-node=2 train.py"""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, SIZE = 8, 16
EPOCHS, BATCH_SIZE, LR, MOMENTUM, SEED, CHECKPOINT = 6, 64, 3e-3, 0.97, 0, "byol.pt"


def make_textures(n, seed):
    """Every class is a grating of its own direction and frequency; phase, contrast and noise vary."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=g)
    angle, freq = (labels % 4) * math.pi / 4, torch.where(labels < 4, 0.7, 1.4)
    ys, xs = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    phase, contrast = 2 * math.pi * torch.rand(n, 1, 1, generator=g), 0.5 + torch.rand(n, 1, 1, generator=g)
    wave = xs * (freq * angle.cos()).view(-1, 1, 1) + ys * (freq * angle.sin()).view(-1, 1, 1)
    images = contrast * torch.sin(wave + phase) + torch.randn(n, SIZE, SIZE, generator=g)
    return TensorDataset(images.unsqueeze(1), labels)


def augment(x):
    """Random circular shift, contrast, brightness and noise, drawn anew for every image."""
    shifts = torch.randint(SIZE, (2, len(x), 1), device=x.device)
    rows, cols = (torch.arange(SIZE, device=x.device) + shifts) % SIZE
    x = x[torch.arange(len(x))[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)
    gain, offset = torch.rand(2, len(x), 1, 1, 1, device=x.device)
    return x * (0.6 + 0.8 * gain) + (offset - 0.5) + 0.3 * torch.randn_like(x)


def mlp(d_in, d_hidden, d_out):
    norm = nn.BatchNorm1d(d_hidden, track_running_stats=False)
    return nn.Sequential(nn.Linear(d_in, d_hidden, bias=False), norm, nn.ReLU(), nn.Linear(d_hidden, d_out))


class Encoder(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projector = mlp(2 * width, 96, 32)

    def forward(self, x):
        return self.projector(self.backbone(x))


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = Encoder(), mlp(32, 96, 32)

    def forward(self, x1, x2):
        return self.predictor(self.encoder(x1)), self.predictor(self.encoder(x2))


@torch.no_grad()
def extract(backbone, loader, device):
    feats, labels = zip(*[(F.normalize(backbone(x.to(device)), dim=1), y.to(device)) for x, y in loader])
    return torch.cat(feats), torch.cat(labels)


def all_gather_cat(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def knn_accuracy(backbone, bank_loader, test_loader, device, k=10):
    """Every rank encodes its share of the bank; its share of the test set is looked up in the whole bank."""
    feats, labels = extract(backbone, bank_loader, device)
    bank, bank_labels = all_gather_cat(feats), all_gather_cat(labels)
    queries, targets = extract(backbone, test_loader, device)
    votes = F.one_hot(bank_labels[(queries @ bank.T).topk(k, dim=1).indices], CLASSES).sum(1)
    counts = torch.tensor([(votes.argmax(1) == targets).sum(), len(targets)], device=device)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    train_set, test_set = make_textures(2048, seed=1), make_textures(512, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True)
    bank_loader = DataLoader(train_set, 256, sampler=DistributedSampler(train_set, shuffle=False))
    test_loader = DataLoader(test_set, 256, sampler=DistributedSampler(test_set, shuffle=False))

    torch.manual_seed(SEED)
    online = Online().to(device)
    target = copy.deepcopy(online.encoder).requires_grad_(False)
    model = DDP(online, device_ids=[local_rank] if use_cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-4)
    total_steps = EPOCHS * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps)
    torch.manual_seed(SEED + 1000 + rank)  # the augmentations differ between the ranks
    start_epoch = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, map_location="cpu")
        online.load_state_dict(state["online"])
        target.load_state_dict(state["target"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["cpu_rng"][rank])
        if use_cuda:
            torch.cuda.set_rng_state(state["cuda_rng"][rank])
        start_epoch = state["epoch"] + 1

    for epoch in range(start_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for step, (x, _) in enumerate(train_loader, start=epoch * len(train_loader)):
            x = x.to(device)
            x1, x2 = augment(x), augment(x)
            p1, p2 = model(x1, x2)
            with torch.no_grad():
                z1, z2 = target(x1), target(x2)
            loss = 2 - (F.cosine_similarity(p1, z2) + F.cosine_similarity(p2, z1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            momentum = 1 - (1 - MOMENTUM) * (math.cos(math.pi * step / total_steps) + 1) / 2
            for t, p in zip(target.parameters(), online.encoder.parameters()):
                t.data.lerp_(p.data, 1 - momentum)
        accuracy = knn_accuracy(online.encoder.backbone, bank_loader, test_loader, device)
        cpu_rng, cuda_rng = [None] * world_size, [None] * world_size
        dist.all_gather_object(cpu_rng, torch.get_rng_state())
        dist.all_gather_object(cuda_rng, torch.cuda.get_rng_state() if use_cuda else None)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.4f}  kNN accuracy {accuracy:.4f}", flush=True)
            torch.save({"online": online.state_dict(), "target": target.state_dict(), "cpu_rng": cpu_rng,
                        "cuda_rng": cuda_rng, "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch}, CHECKPOINT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
