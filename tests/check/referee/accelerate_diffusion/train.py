"""Flow matching on a two-dimensional toy distribution with Accelerate.

    accelerate launch train.py                          # as answered in `accelerate config`
    torchrun --standalone --nproc-per-node=2 train.py   # also without a GPU
"""
import argparse
import math
import os
import shutil

import torch
import torch.nn as nn
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--ema-decay", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last finished epoch")
    return parser.parse_args()


NUM_ARMS = 3


def make_spiral(n, seed):
    """Points on the arms of a spiral, and the arm of each."""
    g = torch.Generator().manual_seed(seed)
    arm = torch.randint(NUM_ARMS, (n,), generator=g)
    radius = 1 + 2 * torch.rand(n, generator=g).sqrt()
    angle = 2 * math.pi * arm / NUM_ARMS + radius
    points = radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + 0.1 * torch.randn(n, 2, generator=g), arm


class VelocityField(nn.Module):
    def __init__(self, width=96, frequencies=4):
        super().__init__()
        self.register_buffer("frequencies", math.pi * torch.arange(1, frequencies + 1))
        self.label = nn.Embedding(NUM_ARMS, width)
        self.enter = nn.Linear(2 + 2 * frequencies, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                                  nn.Linear(width, 2))

    def forward(self, x, t, label):
        phase = t.unsqueeze(1) * self.frequencies
        return self.body(self.enter(torch.cat([x, phase.sin(), phase.cos()], dim=1)) + self.label(label))


def flow_matching_loss(model, data, noise, t, label):
    """Squared error of the velocity on the straight way from the noise to the data, one value per sample."""
    x = torch.lerp(noise, data, t.unsqueeze(1))
    return (model(x, t, label) - (data - noise)).square().mean(dim=1)


@torch.no_grad()
def sample(model, label, generator, steps=20):
    x = torch.randn(len(label), 2, generator=generator).to(label.device)
    for i in range(steps):
        x = x + model(x, torch.full((len(label),), i / steps, device=label.device), label) / steps
    return x


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


@torch.no_grad()
def validate(accelerator, model, loader):
    losses = [accelerator.gather_for_metrics(flow_matching_loss(model, *batch)) for batch in loader]
    return torch.cat(losses).mean().item()


class Progress:
    """Goes into the checkpoint next to what Accelerate puts there itself."""

    def __init__(self):
        self.epoch = self.step = 0

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def save_checkpoint(accelerator, folder):
    accelerator.save_state(folder + ".tmp")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(folder + ".tmp", folder)


def main():
    args = parse_args()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    set_seed(args.seed, device_specific=True)  # every process draws noise of its own

    points, arms = make_spiral(3072, args.seed)
    val_points, val_arms = make_spiral(500, args.seed + 1)
    g = torch.Generator().manual_seed(args.seed + 2)  # the same noise and times in each validation
    val_set = TensorDataset(val_points, torch.randn(500, 2, generator=g), torch.rand(500, generator=g), val_arms)
    train_loader = DataLoader(TensorDataset(points, arms), args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, 64)

    model = VelocityField()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    steps_per_epoch = math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    total_steps = args.epochs * steps_per_epoch

    def warmup_cosine(step):
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        return 0.5 * (1 + math.cos(math.pi * min(1.0, step / total_steps)))

    # not prepared: Accelerate would step it num_processes times; here it counts optimizer steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, warmup_cosine)
    ema = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(args.ema_decay)).eval()
    progress = Progress()
    accelerator.register_for_checkpointing(scheduler, ema, progress)

    last = os.path.join(args.output_dir, "last")
    if args.resume and os.path.isdir(last):
        accelerator.load_state(last)

    while progress.epoch < args.epochs:
        train_loader.set_epoch(progress.epoch)
        train_loss = torch.zeros((), device=accelerator.device)
        for data, label in train_loader:
            with accelerator.accumulate(model):
                noise, t = torch.randn_like(data), torch.rand(len(data), device=data.device)
                loss = flow_matching_loss(model, data, noise, t, label).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    scheduler.step()
                    ema.update_parameters(accelerator.unwrap_model(model))
                    progress.step += 1
            train_loss += loss.detach()
        progress.epoch += 1
        train_loss = accelerator.reduce(train_loss, reduction="mean").item() / len(train_loader)
        val_loss = validate(accelerator, ema, val_loader)
        accelerator.print(f"epoch {progress.epoch} (step {progress.step}): loss {train_loss:.4f}, val {val_loss:.4f}, "
                          f"lr {optimizer.param_groups[0]['lr']:.1e}", flush=True)
        save_checkpoint(accelerator, last)

    if accelerator.is_main_process:
        points = sample(ema, val_arms.to(accelerator.device), torch.Generator().manual_seed(args.seed))
        print(f"energy distance of samples {energy_distance(points.cpu(), val_points):.4f}, "
              f"of pure noise {energy_distance(torch.randn_like(val_points), val_points):.4f}", flush=True)
        torch.save(ema.module.state_dict(), os.path.join(args.output_dir, "ema.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
