"""Segmentation with Accelerate, gradient accumulation and an EMA model.

    torchrun --nproc_per_node=2 train.py              (or: accelerate launch --num_processes 2 train.py)
    torchrun --nproc_per_node=2 train.py --resume     goes on after the last finished epoch
"""
import argparse
import math
import os
import re
import shutil

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from shapes import CLASSES, Shapes, augment
from unet import EMA, UNet


class Progress:
    """What else a checkpoint must remember."""

    def __init__(self):
        self.epochs_done, self.best_iou = 0, 0.0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--stop-after", type=int, default=None, help="stop after this epoch, the schedule unchanged")
    parser.add_argument("--batch-size", type=int, default=8, help="pictures per process and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--lr", type=float, default=1.5e-2)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--ema-decay", type=float, default=0.9)
    parser.add_argument("--mixed-precision", default="no", choices=["no", "fp16", "bf16"])
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="number of checkpoints to keep")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def segmentation_loss(logits, masks):
    """Cross entropy plus the soft Dice loss of each picture, averaged over the pictures."""
    probabilities = logits.softmax(1)
    wanted = F.one_hot(masks, logits.shape[1]).permute(0, 3, 1, 2).to(probabilities.dtype)
    overlap = (probabilities * wanted).sum((2, 3))
    dice = (2 * overlap + 1) / (probabilities.sum((2, 3)) + wanted.sum((2, 3)) + 1)
    return F.cross_entropy(logits, masks) + 1 - dice.mean()


@torch.no_grad()
def evaluate(model, loader, accelerator):
    """IoU of each class over all validation pictures. Called by every process, the result is the same on all."""
    confusion = torch.zeros(len(CLASSES), len(CLASSES), dtype=torch.long, device=accelerator.device)
    for images, masks in loader:
        with accelerator.autocast():
            predictions = model(images).argmax(1)
        predictions, masks = accelerator.gather_for_metrics((predictions, masks))
        pairs = (masks * len(CLASSES) + predictions).flatten()
        confusion += torch.bincount(pairs, minlength=len(CLASSES) ** 2).view_as(confusion)
    right = confusion.diagonal()
    return right / (confusion.sum(0) + confusion.sum(1) - right).clamp(min=1)


def checkpoints(folder):
    """Finished checkpoints, oldest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    names = [name for name in names if re.fullmatch(r"epoch_\d+", name)]
    return [os.path.join(folder, name) for name in sorted(names, key=lambda name: int(name.split("_")[1]))]


def save(accelerator, folder, epoch, keep):
    """All processes write into a .part folder (each its own random states), then the main process renames it."""
    final = os.path.join(folder, f"epoch_{epoch}")
    if accelerator.is_main_process:
        shutil.rmtree(final + ".part", ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(final + ".part")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(final, ignore_errors=True)  # left by an earlier run
        os.rename(final + ".part", final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def main():
    args = parse_args()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without it, processes without a GPU would not find each other
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed))
    set_seed(args.seed)

    train_loader = DataLoader(Shapes(384, seed=args.seed), batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(Shapes(90, seed=args.seed + 1), batch_size=2 * args.batch_size)
    model = UNet(len(CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

    # The schedule counts optimizer steps. It is stepped by hand once for each of them, so it is not prepared:
    # a prepared scheduler makes num_processes steps at a time.
    total_steps = args.epochs * math.ceil(len(train_loader) / args.accumulate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / total_steps)))
    ema = EMA(accelerator.unwrap_model(model), args.ema_decay)
    progress = Progress()
    accelerator.register_for_checkpointing(ema, scheduler, progress)
    set_seed(args.seed, device_specific=True)  # other augmentations and dropout masks on each process

    if args.resume and checkpoints(args.checkpoint_dir):
        newest = checkpoints(args.checkpoint_dir)[-1]
        accelerator.load_state(newest)
        accelerator.print(f"resumed from {newest}")

    for epoch in range(progress.epochs_done, min(args.epochs, args.stop_after or args.epochs)):
        model.train()
        train_loader.set_epoch(epoch)
        loss_sum = torch.zeros((), device=accelerator.device)
        for images, masks in train_loader:
            with accelerator.accumulate(model):
                images, masks = augment(images, masks)
                with accelerator.autocast():
                    logits = model(images)
                loss = segmentation_loss(logits.float(), masks)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                scheduler.step()
                ema.update(accelerator.unwrap_model(model))
            loss_sum += loss.detach()

        train_loss = accelerator.reduce(loss_sum / len(train_loader), reduction="mean").item()
        iou = evaluate(ema.model, val_loader, accelerator)
        progress.epochs_done = epoch + 1
        progress.best_iou = max(progress.best_iou, iou.mean().item())
        accelerator.print(f"epoch {epoch}: loss {train_loss:.4f}, lr {scheduler.get_last_lr()[0]:.5f}, mean IoU "
                          f"{iou.mean():.4f} (" + ", ".join(f"{n} {v:.3f}" for n, v in zip(CLASSES, iou)) + ")",
                          flush=True)
        save(accelerator, args.checkpoint_dir, epoch, args.keep)

    accelerator.print(f"best mean IoU {progress.best_iou:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
