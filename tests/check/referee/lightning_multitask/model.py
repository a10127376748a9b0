import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torchmetrics import MeanAbsoluteError, MeanMetric
from torchmetrics.classification import MulticlassF1Score

from data import MAX_ANGLE

TASKS = ("digit", "angle")


class MultiTaskNet(nn.Module):
    """One trunk, two heads. GroupNorm, so that there are no running statistics to keep equal between ranks."""

    def __init__(self, width=24, dropout=0.1):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
            nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width * 16, 96), nn.ReLU())
        self.digit_head = nn.Linear(96, 10)
        self.angle_head = nn.Linear(96, 1)

    def forward(self, images):
        features = self.trunk(images)
        return self.digit_head(features), self.angle_head(features).squeeze(1)


class MultiTask(L.LightningModule):
    def __init__(self, lr=1e-2, weight_decay=1e-4, dropout=0.1, seed=0):
        super().__init__()
        self.save_hyperparameters()
        self.net = MultiTaskNet(dropout=dropout)
        self.task_weights = torch.ones(len(TASKS))  # kept by TaskBalancer
        self.val_loss = MeanMetric()
        self.val_f1 = MulticlassF1Score(num_classes=10, average="macro")
        self.val_mae = MeanAbsoluteError()

    def forward(self, images):
        return self.net(images)

    def task_losses(self, logits, angles, digits, targets):
        return torch.stack([F.cross_entropy(logits, digits), F.smooth_l1_loss(angles, targets, beta=0.1)])

    def on_train_epoch_start(self):
        # dropout masks: other ones on each rank and in each epoch, and the same ones in a resumed run
        torch.manual_seed(self.hparams.seed + 1000 * (self.current_epoch + 1) + self.global_rank)

    def training_step(self, batch, batch_idx):
        images, digits, targets = batch
        losses = self.task_losses(*self(images), digits, targets)
        loss = (self.task_weights * losses).sum()
        return {"loss": loss, "task_losses": losses.detach()}

    def validation_step(self, batch, batch_idx):
        images, digits, targets = batch
        logits, angles = self(images)
        self.val_loss.update(self.task_losses(logits, angles, digits, targets).sum(), weight=len(images))
        self.val_f1.update(logits, digits)
        self.val_mae.update(angles * MAX_ANGLE, targets * MAX_ANGLE)
        # metric objects: torchmetrics adds up their counts over the ranks at the end of the epoch
        self.log("val_loss", self.val_loss, on_step=False, on_epoch=True)
        self.log("val_f1", self.val_f1, on_step=False, on_epoch=True)
        self.log("val_mae", self.val_mae, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        total_steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=total_steps, pct_start=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
