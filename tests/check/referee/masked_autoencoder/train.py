"""Masked autoencoder pretraining of a small ViT.  torchrun --nproc-per-node=2 train.py"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Stripes(Dataset):
    """Images of overlaid waves, made from their index."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        grid = torch.linspace(-1, 1, 16)
        angle, phase = math.pi * torch.rand(2, generator=g)
        wave = torch.cos(1.5 * (grid[:, None] * angle.cos() + grid[None] * angle.sin()) + phase)
        return torch.stack([wave, wave ** 2 - 0.5])


def make_blocks(dim, depth):
    layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(dim), enable_nested_tensor=False)


class MaskedAutoencoder(nn.Module):
    def __init__(self, image_size=16, patch=4, channels=2, dim=48, depth=2, mask_ratio=0.6):
        super().__init__()
        self.patch, self.mask_ratio = patch, mask_ratio
        n, features = (image_size // patch) ** 2, channels * patch * patch
        self.embed = nn.Linear(features, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, n, dim))
        self.encoder = make_blocks(dim, depth)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.decoder_pos = nn.Parameter(0.02 * torch.randn(1, n, dim))
        self.decoder = make_blocks(dim, 1)
        self.to_pixels = nn.Linear(dim, features)

    def forward(self, images):
        target = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        b, n, _ = target.shape
        order = torch.rand(b, n, device=images.device).argsort(dim=1)
        keep = order[:, :int(n * (1 - self.mask_ratio))]
        x = self.embed(target) + self.pos
        index = keep.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        encoded = self.encoder(x.gather(1, index))
        tokens = self.mask_token.to(encoded.dtype).expand(b, n, -1).scatter(1, index, encoded)
        pred = self.to_pixels(self.decoder(tokens + self.decoder_pos))
        masked = torch.ones(b, n, device=images.device).scatter(1, keep, 0.0)
        return (((pred.float() - target) ** 2).mean(-1) * masked).sum() / masked.sum()


def set_lr(optimizer, args, step, total_steps, warmup_steps):
    if step < warmup_steps:
        lr = args.lr * (step + 1) / warmup_steps
    else:
        lr = 0.5 * args.lr * (1 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps)))
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16, help="per GPU")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--num-images", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="checkpoints")
    parser.add_argument("--resume", default="", help="checkpoint to continue from")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    dataset = Stripes(args.num_images)
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, pin_memory=True, drop_last=True)
    torch.manual_seed(args.seed)
    model = DDP(MaskedAutoencoder().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch = checkpoint["epoch"] + 1

    os.makedirs(args.output_dir, exist_ok=True)
    steps_per_epoch = len(loader)
    total_steps, warmup_steps = args.epochs * steps_per_epoch, args.warmup_epochs * steps_per_epoch
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(args.seed + epoch * world_size + rank + 1)  # own masks on every rank and in every epoch
        loss_sum = torch.zeros(()).cuda()
        for i, images in enumerate(loader):
            lr = set_lr(optimizer, args, epoch * len(loader) + i, total_steps, warmup_steps)
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                loss = model(images.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        if rank == 0:
            train_loss = loss_sum.item() / len(loader) / world_size
            print(f"epoch {epoch}  train loss {train_loss:.4f}  lr {lr:.6f}", flush=True)
            path = os.path.join(args.output_dir, "mae.pt")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, path + ".tmp")
            os.replace(path + ".tmp", path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
