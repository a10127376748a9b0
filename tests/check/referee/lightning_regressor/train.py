"""A regressor in Lightning: data module, DDP strategy, EMA of the weights as a callback, torchmetrics, checkpoints, resume.

Every start trains --epochs epochs, on top of those in the checkpoint that it finds in --out.
"""
import argparse
import os

import lightning as L
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Subset, TensorDataset


def make_data(n=4200, seed=3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * (x[:, 3:] ** 2).sum(1) + 0.2 * torch.randn(n, generator=g)
    return x, y[:, None]


class Data(L.LightningDataModule):
    """3600 rows to train, 600 to validate: numbers that divide evenly, so that no sampler has to repeat rows."""

    def __init__(self, folder, batch):
        super().__init__()
        self.path, self.batch = os.path.join(folder, "data.pt"), batch

    def prepare_data(self):
        if not os.path.exists(self.path):
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            torch.save(make_data(), self.path)

    def setup(self, stage=None):
        self.data = TensorDataset(*torch.load(self.path))
        order = np.random.default_rng(1).permutation(len(self.data)).tolist()
        self.train, self.val = Subset(self.data, order[600:]), Subset(self.data, order[:600])

    def loader(self, data, **options):
        batch = self.batch // self.trainer.world_size
        return DataLoader(data, batch_size=batch, pin_memory=torch.cuda.is_available(), **options)

    def train_dataloader(self):
        return self.loader(self.train, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return self.loader(self.val)


class Regressor(L.LightningModule):
    def __init__(self, lr=3e-3, width=96):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.r2 = torchmetrics.R2Score()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        guess = self(x)
        self.r2.update(guess, y)
        self.log("val_loss", F.mse_loss(guess, y), batch_size=len(x), sync_dist=True)

    def on_validation_epoch_end(self):
        self.log("val_r2", self.r2.compute())  # compute() gathers the sums of all ranks
        self.r2.reset()

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 20) * 0.997 ** i)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


class EMA(Callback):
    """Keeps an exponential moving average of the weights and validates with it."""

    def __init__(self, decay=0.98):
        self.decay, self.average, self.backup = decay, None, None

    def on_train_start(self, trainer, module):
        start = self.average or module.net.state_dict()
        self.average = {k: v.detach().to(module.device, copy=True) for k, v in start.items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for k, v in module.net.state_dict().items():
            self.average[k].lerp_(v, 1 - self.decay)

    def on_validation_start(self, trainer, module):
        self.backup = {k: v.clone() for k, v in module.net.state_dict().items()}
        module.net.load_state_dict(self.average)

    def on_validation_end(self, trainer, module):
        module.net.load_state_dict(self.backup)
        self.backup = None

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


class Report(Callback):
    def on_train_epoch_end(self, trainer, module):
        if trainer.is_global_zero:
            m = trainer.callback_metrics
            print(f"epoch {trainer.current_epoch}: " + ", ".join(f"{k} {m[k].item():.4f}" for k in ("train_loss", "val_loss", "val_r2")), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=120, help="rows per step over all ranks")
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    L.seed_everything(0, verbose=False)
    last = os.path.join(args.out, "last.ckpt")
    resume = last if os.path.exists(last) else None
    done = torch.load(last, map_location="cpu", weights_only=False)["epoch"] + 1 if resume else 0
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy="ddp",
        max_epochs=done + args.epochs,
        num_sanity_val_steps=0,
        gradient_clip_val=5.0,
        callbacks=[EMA(), Report(), ModelCheckpoint(args.out, filename="best", monitor="val_loss", save_last=True)],
        logger=CSVLogger(args.out),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regressor(), datamodule=Data(args.out, args.batch), ckpt_path=resume)


if __name__ == "__main__":
    main()
