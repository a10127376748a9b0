"""Barlow Twins on one-dimensional signals, with a linear probe that is trained alongside."""
import math

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class GlobalSum(torch.autograd.Function):
    """Sum over the ranks, through which gradients flow: each rank's input is part of every rank's loss."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


global_sum = GlobalSum.apply


def standardize(z, n):
    """Zero mean and unit variance of every feature over the n samples of all ranks."""
    z = z - global_sum(z.sum(dim=0)) / n
    variance = global_sum(z.square().sum(dim=0)) / n
    return z / (variance + 1e-5).sqrt()


def conv_block(channels, out_channels):
    return nn.Sequential(nn.Conv1d(channels, out_channels, 5, stride=2, padding=2),
                         nn.GroupNorm(4, out_channels), nn.GELU())


class BarlowTwins(L.LightningModule):
    def __init__(self, num_classes, width=32, projection=64, lr=3e-3, weight_decay=1e-4, warmup=0.1, off_diagonal=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            conv_block(1, width), conv_block(width, 2 * width), conv_block(2 * width, 2 * width),
            nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.projector = nn.Sequential(
            nn.Linear(2 * width, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, projection))
        self.probe = nn.Linear(2 * width, num_classes)
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.val_loss = MeanMetric()

    def forward(self, signal):
        return self.probe(self.encoder(signal))

    def barlow_loss(self, z1, z2):
        """Of the cross-correlation matrix of the global batch: ones on the diagonal, zeros elsewhere."""
        n = len(z1) * self.trainer.world_size
        z1, z2 = standardize(z1, n), standardize(z2, n)
        c = global_sum(z1.T @ z2) / n
        diagonal = torch.diagonal(c)
        on = (diagonal - 1).square().sum()
        off = c.square().sum() - diagonal.square().sum()
        return on + self.hparams.off_diagonal * off

    def training_step(self, batch, batch_idx):
        view1, view2, labels = batch
        features = self.encoder(torch.cat([view1, view2]))
        z1, z2 = self.projector(features).chunk(2)
        barlow = self.barlow_loss(z1, z2)
        # the probe sees features without gradient: it measures the encoder, it does not teach it
        probe = F.cross_entropy(self.probe(features.detach()), labels.repeat(2))
        self.log_dict({"train/barlow": barlow.detach(), "train/probe": probe.detach()},
                      on_step=False, on_epoch=True, sync_dist=True, batch_size=len(labels))
        return barlow + probe

    def validation_step(self, batch, batch_idx):
        signal, labels = batch
        logits = self(signal)
        self.val_accuracy.update(logits, labels)
        self.val_loss.update(F.cross_entropy(logits, labels), weight=len(labels))
        self.log("val/accuracy", self.val_accuracy, on_step=False, on_epoch=True)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        total_steps = self.trainer.estimated_stepping_batches
        warmup_steps = max(1, int(self.hparams.warmup * total_steps))

        def factor(step):
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
