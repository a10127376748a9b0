"""
Tiny CLIP on rendered toy scenes, trained with 🤗 Accelerate.

    torchrun --nproc-per-node=2 train.py
    torchrun --nproc-per-node=2 train.py --resume_from outputs/epoch_1
"""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

COLOURS, SHAPES = 5, 4
# "a <colour> <shape> beside a <colour> <shape>"
CAPTIONS = torch.cartesian_prod(*[torch.arange(n) for n in (COLOURS, SHAPES, COLOURS, SHAPES)])


def render(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(CAPTIONS), (n,), generator=g)
    palette = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1.]])
    r = torch.arange(8) - 3.5
    y, x = torch.meshgrid(r, r, indexing="ij")
    stencils = torch.stack([y ** 2 + x ** 2 < 10, (y - x).abs() < 2, y.abs() < 2, x.abs() < 2]).float()
    c1, s1, c2, s2 = CAPTIONS[ids].unbind(1)
    left, right = (palette[c][:, :, None, None] * stencils[s][:, None] for c, s in ((c1, s1), (c2, s2)))
    images = torch.cat([left, right], dim=3)
    return TensorDataset(images + 0.25 * torch.randn(images.shape, generator=g), ids)


def tokenize(ids):
    # one vocabulary: 0 is [CLS], then colours, then shapes
    words = CAPTIONS.to(ids.device)[ids] + torch.tensor([1, 1 + COLOURS, 1, 1 + COLOURS], device=ids.device)
    return F.pad(words, (1, 0))


class ToyCLIP(nn.Module):
    def __init__(self, width=32, dim=24):
        super().__init__()
        self.visual = nn.Sequential(
            nn.Conv2d(3, 3 * width, 8, 8), nn.ReLU(), nn.Conv2d(3 * width, 2 * width, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(4 * width, dim))
        self.embed = nn.Embedding(1 + COLOURS + SHAPES, width)
        self.position = nn.Parameter(0.02 * torch.randn(5, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.05, batch_first=True, norm_first=True)
        self.text_proj = nn.Linear(width, dim)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.1)))

    def encode_text(self, tokens):
        return F.normalize(self.text_proj(self.block(self.embed(tokens) + self.position)[:, 0]), dim=-1)

    def forward(self, images, tokens):
        return F.normalize(self.visual(images), dim=-1), self.encode_text(tokens), self.logit_scale.exp()


class GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        out = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(out, features.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def clip_loss(image, text, scale):
    # own rows against the columns of all processes
    all_image, all_text = GatherFeatures.apply(image), GatherFeatures.apply(text)
    target = torch.arange(len(image), device=image.device) + dist.get_rank() * len(image)
    return (F.cross_entropy(scale * image @ all_text.T, target) + F.cross_entropy(scale * text @ all_image.T, target)) / 2


class EMA(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for average, current in zip(self.model.parameters(), model.parameters()):
            average.lerp_(current, 1 - self.decay)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=6e-3)
    parser.add_argument("--ema_decay", type=float, default=0.97)
    parser.add_argument("--output_dir", default="outputs")
    parser.add_argument("--resume_from")
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0))
    set_seed(0)
    model = ToyCLIP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    train_loader = DataLoader(render(3072, seed=1), batch_size=args.batch_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(render(501, seed=2), batch_size=64)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    ema = EMA(accelerator.unwrap_model(model), args.ema_decay)
    # one scheduler step per optimizer step, hence not given to prepare()
    total = args.num_epochs * math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer.optimizer, lambda s: min(1, (s + 1) / 10) * 0.5 * (1 + math.cos(math.pi * min(1, s / total))))
    accelerator.register_for_checkpointing(scheduler, ema)

    first_epoch = 0
    if args.resume_from:
        accelerator.load_state(args.resume_from)
        first_epoch = int(args.resume_from.rstrip("/").rsplit("_", 1)[1]) + 1
    for epoch in range(first_epoch, args.num_epochs):
        train_loader.set_epoch(epoch)
        set_seed(100 + epoch, device_specific=True)  # text dropout
        model.train()
        losses = []
        for images, ids in train_loader:
            with accelerator.accumulate(model):
                loss = clip_loss(*model(images, tokenize(ids)))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    scheduler.step()
                    ema.update(accelerator.unwrap_model(model))
            losses.append(loss.detach())

        hits = []
        with torch.no_grad():
            known = ema.model.encode_text(tokenize(torch.arange(len(CAPTIONS), device=accelerator.device)))
            for images, ids in eval_loader:
                guess = (F.normalize(ema.model.visual(images), dim=-1) @ known.T).argmax(-1)
                hits.append(accelerator.gather_for_metrics(guess == ids))
        hits = torch.cat(hits)
        entry = {"epoch": epoch, "loss": accelerator.reduce(torch.stack(losses).mean(), "mean").item(),
                 "retrieval@1": hits.float().mean().item(), "n": len(hits), "lr": scheduler.get_last_lr()[0]}
        accelerator.print(entry, flush=True)
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
