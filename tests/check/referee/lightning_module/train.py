"""Fault detection in short sensor recordings with Lightning: a 1D convolutional network, three kinds of signals."""

import argparse
import os

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

CLASSES = ("normal", "slow drift", "spikes")


def make_recordings(size, length=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (size,), generator=generator)
    time = torch.linspace(0, 6.28, length)
    phase = 6.28 * torch.rand(size, 1, generator=generator)
    signals = torch.sin(2 * time + phase) + 0.4 * torch.randn(size, length, generator=generator)
    signals += (labels == 1).unsqueeze(1) * time / 4
    spikes = (torch.rand(size, length, generator=generator) < 0.06) * 2.0
    signals += (labels == 2).unsqueeze(1) * spikes
    return signals.unsqueeze(1), labels


class RecordingsModule(L.LightningDataModule):
    def __init__(self, batch_size=16, split_seed=5):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        recordings = TensorDataset(*make_recordings(1008))
        self.train_set, self.val_set, self.test_set = random_split(
            recordings, [720, 144, 144], generator=torch.Generator().manual_seed(self.hparams.split_seed))

    def loader(self, dataset, **kwargs):
        return DataLoader(dataset, batch_size=self.hparams.batch_size, pin_memory=torch.cuda.is_available(), **kwargs)

    def train_dataloader(self):
        return self.loader(self.train_set, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return self.loader(self.val_set)

    def test_dataloader(self):
        return self.loader(self.test_set)


class FaultDetector(L.LightningModule):
    def __init__(self, width=16, lr=5e-3, noise=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv1d(1, width, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(width, width, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool1d(4),
            nn.Flatten(), nn.Linear(4 * width, len(CLASSES)),
        )
        self.val_accuracy = MulticlassAccuracy(len(CLASSES), average="micro")
        self.test_accuracy = MulticlassAccuracy(len(CLASSES), average="micro")

    def training_step(self, batch, batch_idx):
        signals, labels = batch
        loss = F.cross_entropy(self.net(signals + self.hparams.noise * torch.randn_like(signals)), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        signals, labels = batch
        logits = self.net(signals)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, on_step=False, on_epoch=True)

    def test_step(self, batch, batch_idx):
        signals, labels = batch
        self.test_accuracy(self.net(signals), labels)
        self.log("test_accuracy", self.test_accuracy, on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        seen = {name: f"{value:.3f}" for name, value in self.trainer.callback_metrics.items() if "_step" not in name}
        self.print(f"epoch {self.current_epoch} {seen}")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps, eta_min=0.05 * self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="per device")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    # each process draws noise of its own
    torch.manual_seed(args.seed + int(os.environ.get("LOCAL_RANK", 0)))
    checkpoint = ModelCheckpoint(args.out, filename="best", monitor="val_loss", save_last=True,
                                 enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu", devices=args.devices,
        strategy="ddp", max_epochs=args.epochs, gradient_clip_val=1.0, log_every_n_steps=5,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=args.out,
        logger=CSVLogger(args.out, name="logs"), num_sanity_val_steps=0,
        callbacks=[checkpoint, EarlyStopping("val_loss", patience=3), LearningRateMonitor("step")],
    )
    last = os.path.join(args.out, "last.ckpt")
    data = RecordingsModule(args.batch_size)
    trainer.fit(FaultDetector(), data, ckpt_path=last if args.resume and os.path.exists(last) else None)
    trainer.test(datamodule=data, ckpt_path=checkpoint.best_model_path, verbose=False)
    accuracy = trainer.callback_metrics["test_accuracy"]
    trainer.print(f"best checkpoint {checkpoint.best_model_path}: test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
