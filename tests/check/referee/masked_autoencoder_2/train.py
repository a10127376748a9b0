"""Masked autoencoder pretraining: a small ViT sees a quarter of the patches and paints the others."""
import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler


def make_images(n, size, seed):  # shades with their own brightness and slopes
    gen = torch.Generator().manual_seed(seed)
    bright, right, down = 2 * torch.rand(3, n, 1, 1, generator=gen) - 1
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    return (bright + right * x + down * y).unsqueeze(1) + 0.05 * torch.randn(n, 1, size, size, generator=gen)


def vit(dim, depth):
    layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class MaskedAutoencoder(nn.Module):
    def __init__(self, size, patch, dim, mask_ratio=0.75):
        super().__init__()
        self.patch, self.num_patches = patch, (size // patch) ** 2
        self.num_kept = round(self.num_patches * (1 - mask_ratio))
        self.embed, self.paint = nn.Linear(patch**2, dim), nn.Linear(dim, patch**2)
        self.position = nn.Parameter(0.02 * torch.randn(1, self.num_patches, dim))
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.encoder, self.decoder = vit(dim, 2), vit(dim, 1)

    def forward(self, images, noise):
        patches = nn.functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        order = noise.argsort(dim=1)
        restore = order.argsort(dim=1).unsqueeze(-1)
        tokens = self.embed(patches) + self.position
        seen = order[:, :self.num_kept].unsqueeze(-1).expand(-1, -1, tokens.size(-1))
        tokens = self.encoder(tokens.gather(1, seen))
        masked = self.mask_token.expand(len(images), self.num_patches - self.num_kept, -1)
        tokens = torch.cat([tokens, masked], dim=1).gather(1, restore.expand(-1, -1, tokens.size(-1)))
        error = (self.paint(self.decoder(tokens + self.position)) - patches).square().mean(dim=-1)
        return error.gather(1, order[:, self.num_kept:]).mean(dim=1)


def adjust_learning_rate(optimizer, epoch, args):  # with each iteration: epoch is a float
    progress = max(0.0, epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
    for group in optimizer.param_groups:
        group["lr"] = args.lr * min(epoch / args.warmup_epochs, 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def validate(mae, loader, noise):
    mae.eval()
    stats = torch.zeros(2).cuda()  # error, images
    for images, part in zip(loader, noise.split(loader.batch_size)):
        error = mae(images.cuda(), part.cuda())
        stats += torch.stack([error.sum(), torch.ones_like(error).sum()])
    dist.all_reduce(stats)
    mae.train()
    return (stats[0] / stats[1]).item()


def save_checkpoint(path, mae, optimizer, epoch, mask_gen):
    mask_rng = [None] * dist.get_world_size()
    dist.all_gather_object(mask_rng, mask_gen.get_state())
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": mae.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "mask_rng": mask_rng}
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--warmup-epochs", type=float, default=1)
    parser.add_argument("--batch-size", type=int, default=32, help="of one process")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--checkpoint", type=Path, default="checkpoints/mae.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    mae = MaskedAutoencoder(size=16, patch=4, dim=48).cuda()
    model = DDP(mae, device_ids=[local_rank])
    train_set, val_set = make_images(768, 16, seed=1), make_images(100, 16, seed=2)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), args.batch_size)
    val_noise = torch.rand(len(val_set), mae.num_patches)[rank::world_size]
    optimizer = torch.optim.AdamW(mae.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    mask_gen = torch.Generator().manual_seed(1000 + rank)
    start_epoch = 0
    if args.resume:
        state = torch.load(args.checkpoint, map_location="cpu")
        mae.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch = state["epoch"] + 1
        mask_gen.set_state(state["mask_rng"][rank])
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(()).cuda()
        for i, images in enumerate(loader):
            adjust_learning_rate(optimizer, epoch + (i + 1) / len(loader), args)
            noise = torch.rand(len(images), mae.num_patches, generator=mask_gen)
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                loss = model(images.cuda(), noise.cuda()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        error = validate(mae, val_loader, val_noise)
        if rank == 0:
            loss = total.item() / (len(loader) * world_size)
            print(f"epoch {epoch}: loss {loss:.3f}, validation error {error:.3f}", flush=True)
        save_checkpoint(args.checkpoint, mae, optimizer, epoch, mask_gen)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
