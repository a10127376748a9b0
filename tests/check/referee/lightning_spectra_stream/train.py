"""Redshift of made-up galaxy spectra, with Lightning: a stream of shards (IterableDataset) shared between ranks and loader workers,
and callbacks of our own for averaged weights and for the best weights."""
import argparse
import os

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torchmetrics import MeanAbsoluteError

BINS, PER_SHARD, SHARDS = 96, 40, 24


def make_shard(seed):
    """Spectra with three emission lines that move with the redshift, on a sloping continuum with noise."""
    rng = np.random.default_rng(seed)
    z = rng.uniform(0.0, 1.0, PER_SHARD).astype(np.float32)
    grid = np.linspace(0, 1, BINS, dtype=np.float32)
    flux = rng.uniform(-1, 1, (PER_SHARD, 1)) * (grid - 0.5) + 0.15 * rng.standard_normal((PER_SHARD, BINS))
    for rest, strength in ((0.05, 1.0), (0.22, 0.7), (0.31, 1.4)):
        flux += strength * rng.uniform(0.7, 1.3, (PER_SHARD, 1)) * np.exp(-((grid - rest - 0.6 * z[:, None]) ** 2) / (2 * 0.012 ** 2))
    return flux.astype(np.float32), z


class SpectraStream(IterableDataset):
    """Every reader (a loader worker of a rank) takes its own shards, in an order that changes with the epoch."""

    def __init__(self, epoch, seed=3):
        self.epoch, self.seed = epoch, seed

    def __len__(self):  # spectra for one rank
        return SHARDS * PER_SHARD // (dist.get_world_size() if dist.is_initialized() else 1)

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        reader, readers = rank * workers + worker, world * workers
        shards = np.random.default_rng([self.seed, self.epoch]).permutation(SHARDS)[reader::readers]
        flux, z = (np.concatenate(part) for part in zip(*(make_shard([17, s]) for s in shards)))
        for i in np.random.default_rng([self.seed, self.epoch, reader]).permutation(len(z)):
            yield torch.from_numpy(flux[i]), torch.tensor(z[i])


class Spectra(L.LightningDataModule):
    def __init__(self, batch, workers):
        super().__init__()
        self.batch, self.workers = batch, workers

    def train_dataloader(self):
        stream = SpectraStream(self.trainer.current_epoch)
        return DataLoader(stream, batch_size=self.batch // self.trainer.world_size, num_workers=self.workers, drop_last=True)

    def val_dataloader(self):
        flux, z = (np.concatenate(part) for part in zip(*(make_shard([18, s]) for s in range(6))))
        return DataLoader(TensorDataset(torch.from_numpy(flux), torch.from_numpy(z)), batch_size=20)  # Lightning adds the distributed sampler


class Redshift(L.LightningModule):
    def __init__(self, lr=4e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Conv1d(1, 24, 9, 2, 4), nn.GroupNorm(4, 24), nn.GELU(), nn.Conv1d(24, 32, 7, 2, 3), nn.GroupNorm(4, 32), nn.GELU(),
                                 nn.Flatten(), nn.Linear(32 * BINS // 4, 64), nn.GELU(), nn.Linear(64, 1))
        self.val_mae = MeanAbsoluteError()

    def forward(self, flux):
        return self.net(flux[:, None])[:, 0]

    def training_step(self, batch, _):
        flux, z = batch
        loss = F.smooth_l1_loss(self(flux), z, beta=0.1)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(z))
        return loss

    def validation_step(self, batch, _):
        flux, z = batch
        self.val_mae.update(self(flux), z)

    def on_validation_epoch_end(self):
        self.log("val_mae", self.val_mae.compute())  # torchmetrics has brought the ranks together, the value is the same on all
        self.val_mae.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=int(self.trainer.estimated_stepping_batches), pct_start=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AveragedWeights(Callback):
    """Exponential average of the weights, used for validation; part of the checkpoint."""

    def __init__(self, decay=0.85):
        self.decay, self.average, self.own, self.seen = decay, None, None, 0

    def on_fit_start(self, trainer, module):
        if self.average is None:  # else it came from the checkpoint
            self.average = {k: v.detach().clone() for k, v in module.net.state_dict().items()}
        self.average = {k: v.to(module.device) for k, v in self.average.items()}

    def on_train_start(self, trainer, module):
        self.seen = trainer.global_step  # on_fit_start comes before the counters of a checkpoint are back

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.seen:  # no optimizer step in this batch
            return
        self.seen = trainer.global_step
        for k, v in module.net.state_dict().items():
            self.average[k].lerp_(v, 1 - self.decay)

    def on_validation_start(self, trainer, module):
        self.own = {k: v.detach().clone() for k, v in module.net.state_dict().items()}
        module.net.load_state_dict(self.average)

    def on_validation_end(self, trainer, module):
        module.net.load_state_dict(self.own)
        self.own = None

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


class KeepBest(Callback):
    """Writes the averaged weights whenever the validation error is the lowest so far, and prints a line per epoch."""

    def __init__(self, folder, averaged):
        self.path, self.averaged, self.best = os.path.join(folder, "best.pt"), averaged, float("inf")

    def on_train_epoch_end(self, trainer, module):
        error = trainer.callback_metrics["val_mae"].item()
        if error < self.best:
            self.best = error
            if trainer.is_global_zero:
                torch.save(self.averaged.average, self.path)
        if trainer.is_global_zero:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            print(f"epoch {trainer.current_epoch}: loss {trainer.callback_metrics['loss']:.5f}, val mae {error:.5f}, best {self.best:.5f}, lr {rate:.2e}", flush=True)

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=48, help="spectra per batch over all ranks")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", default="run")
    args = parser.parse_args()

    L.seed_everything(0)
    os.makedirs(args.out, exist_ok=True)
    averaged = AveragedWeights()
    saver = ModelCheckpoint(dirpath=args.out, filename="last", enable_version_counter=False, save_on_train_epoch_end=True)
    trainer = L.Trainer(accelerator="auto", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp", max_epochs=args.epochs,
                        accumulate_grad_batches=args.accumulate, gradient_clip_val=1.0, reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0,
                        callbacks=[averaged, KeepBest(args.out, averaged), saver], logger=False, enable_progress_bar=False, enable_model_summary=False)
    last = os.path.join(args.out, "last.ckpt")
    trainer.fit(Redshift(), datamodule=Spectra(args.batch, args.workers), ckpt_path=last if os.path.exists(last) else None)


if __name__ == "__main__":
    main()
