"""Forecasts of load curves with Lightning: data module, weight average, one-cycle schedule, best and last checkpoint.

A second start continues from the last checkpoint in --out up to --epochs.
"""
import argparse
import math
import os

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

PAST, FUTURE = 96, 24


def make_curves(n, seed=3):
    """n curves of PAST + FUTURE hours: a level, a daily and a half-daily wave, and noise."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(PAST + FUTURE, dtype=torch.float32)
    curves = 50 + 6 * torch.randn(n, 1, generator=g) + 0.3 * torch.randn(n, len(t), generator=g)
    for period in (24, 12):
        phase, height = 2 * math.pi * torch.rand(n, 1, generator=g), 2 + 6 * torch.rand(n, 1, generator=g)
        curves += height * torch.sin(2 * math.pi * t / period + phase)
    return curves


class Curves(L.LightningDataModule):
    def __init__(self, folder, batch, n_train=9600, n_val=1200):
        super().__init__()
        self.file, self.batch, self.n_train, self.n_val = os.path.join(folder, "curves.pt"), batch, n_train, n_val
        self.mean, self.std = 0.0, 1.0

    def prepare_data(self):
        if not os.path.exists(self.file):
            torch.save(make_curves(self.n_train + self.n_val), self.file + ".tmp")
            os.replace(self.file + ".tmp", self.file)

    def setup(self, stage):
        curves = torch.load(self.file)
        self.mean, self.std = curves[:self.n_train].mean().item(), curves[:self.n_train].std().item()
        curves = (curves - self.mean) / self.std
        self.train = TensorDataset(curves[:self.n_train, :PAST], curves[:self.n_train, PAST:])
        self.val = TensorDataset(curves[self.n_train:, :PAST], curves[self.n_train:, PAST:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch // self.trainer.world_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=200 // self.trainer.world_size)


class Forecaster(L.LightningModule):
    def __init__(self, lr=4e-3, width=32):
        super().__init__()
        self.save_hyperparameters()
        layers = []
        for i, step in enumerate((1, 2, 4, 8)):
            layers += [nn.Conv1d(width if i else 1, width, 3, padding=step, dilation=step), nn.GELU()]
        self.body = nn.Sequential(*layers, nn.Conv1d(width, 8, 1), nn.Flatten())
        self.head = nn.Linear(8 * PAST, FUTURE)
        self.errors = []

    def forward(self, past):
        return self.head(self.body(past[:, None]))

    def training_step(self, batch, batch_idx):
        past, future = batch
        loss = F.mse_loss(self(past), future)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        past, future = batch
        self.errors.append((self(past) - future).abs() * self.trainer.datamodule.std)

    def on_validation_epoch_end(self):
        errors = self.all_gather(torch.cat(self.errors))  # every rank has as many curves
        self.errors.clear()
        self.log("val_error", errors.flatten().median())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WeightAverage(Callback):
    """Moving average of the weights over the steps, used in validation."""

    def __init__(self, decay=0.99):
        self.decay, self.average, self.own = decay, None, None

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]

    def on_train_start(self, trainer, module):
        start = module.state_dict() if self.average is None else self.average
        self.average = {name: value.detach().clone().to(module.device) for name, value in start.items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        decay = min(self.decay, (1 + trainer.global_step) / (10 + trainer.global_step))
        for name, value in module.state_dict().items():
            self.average[name].lerp_(value, 1 - decay)

    def on_validation_start(self, trainer, module):
        self.own = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict(self.average)

    def on_validation_end(self, trainer, module):
        module.load_state_dict(self.own)


class Keep(Callback):
    """Keeps the weights of each epoch and says how it went."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, module):
        path = os.path.join(self.folder, f"weights-{trainer.current_epoch}.ckpt")
        trainer.save_checkpoint(path, weights_only=True)
        if trainer.is_global_zero:
            train, val = (trainer.callback_metrics[name].item() for name in ("train_loss", "val_error"))
            print(f"epoch {trainer.current_epoch}: train loss {train:.4f}, median error {val:.4f}, "
                  f"lr {trainer.optimizers[0].param_groups[0]['lr']:.2e}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=96, help="curves per step over all devices")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    os.makedirs(args.out, exist_ok=True)
    L.seed_everything(1, workers=True)
    checkpoints = ModelCheckpoint(args.out, "best", monitor="val_error", mode="min", save_top_k=1, save_last=True,
                                  enable_version_counter=False, save_on_train_epoch_end=True)
    trainer = L.Trainer(
        strategy="ddp", accelerator="auto", devices=args.devices, max_epochs=args.epochs, gradient_clip_val=1.0,
        num_sanity_val_steps=0, enable_progress_bar=False, logger=CSVLogger(args.out, name="logs"),
        callbacks=[WeightAverage(), Keep(args.out), LearningRateMonitor("step"), checkpoints])
    trainer.fit(Forecaster(), datamodule=Curves(args.out, args.batch), ckpt_path="last")
    trainer.print(f"best {checkpoints.best_model_score:.4f} in {checkpoints.best_model_path}")


if __name__ == "__main__":
    main()
