"""Classify short sounds (hum, rising chirp, falling chirp, warble) with Lightning; the classes are far from balanced.

    python train.py --devices 2

Started again, the run goes on from the last epoch in --dir.
"""
import argparse
import math
import os

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassF1Score

CLASSES = ["hum", "rising", "falling", "warble"]
FREQUENCY = [0.55, 0.25, 0.13, 0.07]


def synthesize(label, seed, length=512):
    """One clip: a tone that stays, rises, falls or wavers, in loud noise."""
    g = torch.Generator().manual_seed(seed)
    start, width, phase, amplitude = torch.rand(4, generator=g).tolist()
    t = torch.linspace(0, 1, length)
    start, width = 40 + 60 * start, 60 + 60 * width
    pitch = [start + 0 * t, start + width * t, start + width * (1 - t),
             start + width * (0.5 + 0.5 * torch.sin(2 * math.pi * 3 * t))][label]
    wave = torch.sin(2 * math.pi * (torch.cumsum(pitch, 0) / length + phase))
    return (0.6 + 0.6 * amplitude) * wave + 0.7 * torch.randn(length, generator=g)


class Clips(Dataset):
    """The clips of a part of a manifest, in memory."""

    def __init__(self, manifest, indices):
        chosen = [manifest[i] for i in indices]
        self.labels = torch.tensor([label for label, _ in chosen])
        self.waves = torch.stack([synthesize(label, seed) for label, seed in chosen])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.waves[i], self.labels[i]


class EpochOrder(Sampler):
    """A new order each epoch, told by Lightning; unlike that of shuffle=True it is the same after a restart."""

    def __init__(self, size, seed):
        self.size, self.seed, self.epoch = size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()

    def __len__(self):
        return self.size


class SoundData(L.LightningDataModule):
    """Every process holds its own share of the clips; the manifests list them all."""

    def __init__(self, batch_size, seed, sizes=(480, 181, 241)):
        super().__init__()
        self.batch_size, self.seed, self.sizes = batch_size, seed, sizes

    def read_manifest(self, part):
        g = torch.Generator().manual_seed(self.seed + part)
        labels = torch.multinomial(torch.tensor(FREQUENCY), self.sizes[part], replacement=True, generator=g)
        return [(label, 100_000 * part + i) for i, label in enumerate(labels.tolist())]

    def setup(self, stage):
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        train, val, test = (self.read_manifest(part) for part in range(3))
        if stage == "fit":
            steps_alike = len(train) // world_size * world_size
            self.train_set = Clips(train, range(rank, steps_alike, world_size))
            self.val_set = Clips(val, range(rank, len(val), world_size))
            counts = torch.bincount(torch.tensor([label for label, _ in train]), minlength=len(CLASSES))
            self.class_weights = counts.sum() / (len(CLASSES) * counts.clamp(min=1))
        else:
            self.test_set = Clips(test, range(rank, len(test), world_size))

    def train_dataloader(self):
        order = EpochOrder(len(self.train_set), self.seed)
        return DataLoader(self.train_set, self.batch_size, sampler=order, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, 64)

    def test_dataloader(self):
        return DataLoader(self.test_set, 64)


class SpectrogramNet(nn.Module):
    def __init__(self, width, n_fft=64, dropout=0.1):
        super().__init__()
        self.n_fft = n_fft
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d((4, 4)), nn.Flatten(), nn.Dropout(dropout), nn.Linear(32 * width, len(CLASSES)))

    def forward(self, wave):
        window = torch.hann_window(self.n_fft, device=wave.device)
        spectrum = torch.stft(wave, self.n_fft, self.n_fft // 2, window=window, return_complex=True).abs()
        return self.layers(torch.log(spectrum + 0.1).unsqueeze(1))


class SoundClassifier(L.LightningModule):
    def __init__(self, width=8, lr=1e-2, seed=0):
        super().__init__()
        self.save_hyperparameters()
        self.net = SpectrogramNet(width)
        self.val_loss = MeanMetric()
        self.val_f1 = MulticlassF1Score(len(CLASSES), average="macro")
        self.test_f1 = MulticlassF1Score(len(CLASSES), average="macro")

    def forward(self, wave):
        return self.net(wave)

    def on_fit_start(self):
        self.class_weights = self.trainer.datamodule.class_weights.to(self.device)

    def on_train_batch_start(self, batch, batch_idx):  # every rank augments in its own way, the same after a restart
        torch.manual_seed(self.hparams.seed + 1000 * self.global_step + self.global_rank)

    def loss(self, logits, labels):
        return (self.class_weights[labels] * F.cross_entropy(logits, labels, reduction="none")).mean()

    def training_step(self, batch, batch_idx):
        waves, labels = batch
        gain = 0.7 + 0.6 * torch.rand(len(waves), 1, device=waves.device)
        return self.loss(self(gain * waves + 0.2 * torch.randn_like(waves)), labels)

    def validation_step(self, batch, batch_idx):
        waves, labels = batch
        logits = self(waves)
        self.val_loss.update(self.loss(logits, labels), len(labels))
        self.val_f1.update(logits, labels)
        self.log("val_loss", self.val_loss)
        self.log("val_f1", self.val_f1)

    def on_train_epoch_end(self):
        values = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch}: val_loss {values['val_loss']:.4f}, val_f1 {values['val_f1']:.4f}")

    def test_step(self, batch, batch_idx):
        waves, labels = batch
        self.test_f1.update(self(waves), labels)
        self.log("test_f1", self.test_f1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.hparams.lr,
                                                       total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", default="checkpoints")
    args = parser.parse_args()

    L.seed_everything(args.seed)
    best = ModelCheckpoint(args.dir, filename="best", monitor="val_f1", mode="max")
    newest = ModelCheckpoint(args.dir, filename="last", enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,  # SoundData gives every process its own clips
        callbacks=[best, newest],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = os.path.join(args.dir, "last.ckpt")
    model = SoundClassifier(lr=args.lr, seed=args.seed)
    data = SoundData(args.batch_size, args.seed)
    trainer.fit(model, data, ckpt_path=last if os.path.exists(last) else None)
    trainer.test(model, data, ckpt_path=best.best_model_path)


if __name__ == "__main__":
    main()
