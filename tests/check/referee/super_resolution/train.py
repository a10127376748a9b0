"""2x super-resolution with a small U-Net and Accelerate.

    accelerate launch --num_processes 2 train.py --epochs 6
"""
import argparse
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset):
    """Overlapping discs and bars with hard edges, and their halved versions."""

    def __init__(self, size, seed, side=24, shapes=4):
        g = torch.Generator().manual_seed(seed)
        y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        self.sharp = torch.full((size, 1, side, side), 0.2)
        for _ in range(shapes):
            cy, cx, angle, radius, shade = (torch.rand(5, size, 1, 1, generator=g)
                                            * torch.tensor([side, side, math.pi, 5.0, 0.8]).view(5, 1, 1, 1))
            disc = (y - cy) ** 2 + (x - cx) ** 2 < (radius + 2) ** 2
            bar = ((y - cy) * angle.cos() + (x - cx) * angle.sin()).abs() < 1.5
            inside = torch.where(torch.rand(size, 1, 1, generator=g) < 0.5, disc, bar)
            self.sharp[:, 0] = torch.where(inside, shade + 0.2, self.sharp[:, 0])
        self.coarse = F.avg_pool2d(self.sharp, 2) + 0.02 * torch.randn(size, 1, side // 2, side // 2, generator=g)

    def __len__(self):
        return len(self.sharp)

    def __getitem__(self, i):
        return self.coarse[i], self.sharp[i]


def block(channels_in, channels_out):
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(4, channels_out), nn.SiLU(),
                         nn.Conv2d(channels_out, channels_out, 3, padding=1), nn.SiLU())


class UNet(nn.Module):
    """Corrects what bicubic enlargement gets wrong."""

    def __init__(self, width=8):
        super().__init__()
        self.down1, self.down2, self.middle = block(1, width), block(width, 2 * width), block(2 * width, 2 * width)
        self.up2, self.up1 = block(4 * width, width), block(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, coarse):
        x = F.interpolate(coarse, scale_factor=2, mode="bicubic", align_corners=False)
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        c = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], dim=1))
        return x + self.out(self.up1(torch.cat([F.interpolate(c, scale_factor=2), a], dim=1)))


class Progress:
    def __init__(self):
        self.epoch, self.best = 0, 0.0

    def state_dict(self):
        return {"epoch": self.epoch, "best": self.best}

    def load_state_dict(self, state):
        self.epoch, self.best = state["epoch"], state["best"]


@torch.no_grad()
def psnr(model, loader, accelerator):
    """Mean over the images of 10 log10(1 / mean squared error)."""
    model.eval()
    values = []
    for coarse, sharp in loader:
        error = (model(coarse).clamp(0, 1) - sharp).square().mean(dim=(1, 2, 3))
        values.append(accelerator.gather_for_metrics(-10 * error.log10()))
    model.train()
    return torch.cat(values).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="per process and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--clip", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="output")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    # without a seedable sampler, a resumed run would begin with the order of the first epoch again
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate,
                              dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(args.seed)
    model = UNet()
    train_loader = DataLoader(Scenes(512, 1), args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(Scenes(101, 2), args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    updates = args.epochs * math.ceil(len(train_loader) / args.accumulate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)  # stepped by hand, once per update
    progress = Progress()
    accelerator.register_for_checkpointing(scheduler, progress)
    os.makedirs(args.out, exist_ok=True)
    folder = os.path.join(args.out, "last")
    if args.resume and os.path.isdir(folder):
        accelerator.load_state(folder)

    for epoch in range(progress.epoch, args.epochs):
        train_loader.set_epoch(epoch)
        losses = []
        for coarse, sharp in train_loader:
            with accelerator.accumulate(model):
                loss = F.l1_loss(model(coarse), sharp)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    scheduler.step()
            losses.append(loss.detach())
        mean_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
        quality = psnr(model, val_loader, accelerator)
        accelerator.print(f"epoch {epoch}: loss {mean_loss:.4f}, validation PSNR {quality:.2f} dB")
        if quality > progress.best:
            progress.best = quality
            accelerator.save(accelerator.get_state_dict(model), os.path.join(args.out, "best.pt"))
        progress.epoch = epoch + 1
        accelerator.save_state(folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()
