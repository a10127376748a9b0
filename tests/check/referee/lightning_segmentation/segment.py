#!/usr/bin/env python
"""Find cells in synthetic microscope images. Lightning starts the second process by itself:

    python segment.py
    python segment.py --resume runs/cells/last.ckpt
"""
from argparse import ArgumentParser

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy, BinaryJaccardIndex


def draw_cells(count: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bright ellipses are cells; the small dots and the stripes of the background are not."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    images = rng.normal(0, 0.5, (count, 1, size, size)) + 0.5 * np.sin(x * 0.9)
    masks = np.zeros((count, 1, size, size))
    for image, mask in zip(images, masks):
        for _ in range(rng.integers(1, 5)):
            (cy, cx), (a, b), turn = rng.uniform(0, size, 2), rng.uniform(3, 6, 2), rng.uniform(0, np.pi)
            u = (x - cx) * np.cos(turn) + (y - cy) * np.sin(turn)
            v = (y - cy) * np.cos(turn) - (x - cx) * np.sin(turn)
            mask[0] = np.maximum(mask[0], (u / a) ** 2 + (v / b) ** 2 < 1)
        for cy, cx in rng.integers(1, size - 1, (6, 2)):
            image[0, cy - 1:cy + 1, cx - 1:cx + 1] += 1
        image += 0.9 * mask
    return torch.from_numpy(images).float(), torch.from_numpy(masks).float()


class CellData(L.LightningDataModule):
    def __init__(self, count: int = 320, size: int = 24, batch_size: int = 8, seed: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        hp = self.hparams
        images, masks = draw_cells(hp.count, hp.size, hp.seed)
        order = np.random.default_rng(hp.seed).permutation(hp.count)
        held_out = hp.count // 4
        self.val_set = TensorDataset(images[order[:held_out]], masks[order[:held_out]])
        self.train_set = TensorDataset(images[order[held_out:]], masks[order[held_out:]])

    def train_dataloader(self):
        return DataLoader(self.train_set, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, self.hparams.batch_size)


def conv(cin: int, cout: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1), nn.GroupNorm(4, cout), nn.ReLU())


class CellSegmenter(L.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.02, seed: int = 0):
        super().__init__()
        self.save_hyperparameters()
        self.fine, self.down = conv(1, width), conv(width, 2 * width, stride=2)
        self.coarse, self.up = conv(2 * width, 2 * width), nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.head = nn.Sequential(conv(2 * width, width), nn.Conv2d(width, 1, 1))
        self.val_iou, self.val_accuracy = BinaryJaccardIndex(), BinaryAccuracy()

    def forward(self, images):
        fine = self.fine(images)
        return self.head(torch.cat([fine, self.up(self.coarse(self.down(fine)))], dim=1))

    def on_train_epoch_start(self):
        trainer = self.trainer  # every process flips and dims its images in its own way
        seed = self.hparams.seed + self.current_epoch * trainer.world_size + trainer.global_rank
        self.chance = torch.Generator().manual_seed(seed)

    def training_step(self, batch, batch_idx):
        images, masks = batch
        for axis in (-1, -2):
            if torch.rand((), generator=self.chance) < 0.5:
                images, masks = images.flip(axis), masks.flip(axis)
        images = images * (0.8 + 0.4 * torch.rand(len(images), 1, 1, 1, generator=self.chance)).to(images)
        loss = F.binary_cross_entropy_with_logits(self(images), masks)
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, masks = batch
        logits = self(images)
        self.val_iou.update(logits, masks.int())
        self.val_accuracy.update(logits, masks.int())
        self.log("val/iou", self.val_iou)
        self.log("val/accuracy", self.val_accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches, pct_start=0.15)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WeightAverage(Callback):
    """Exponential moving average of the weights, put in place of the weights for validation and in between kept here.

    The checkpoints hold the weights as trained and the average as the state of this callback.
    """

    def __init__(self, decay: float = 0.95):
        self.decay, self.average, self.trained = decay, None, None

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]

    def on_fit_start(self, trainer, module):
        if self.average is None:
            self.average = [p.detach().clone() for p in module.parameters()]
        self.average = [a.to(module.device) for a in self.average]

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        torch._foreach_lerp_(self.average, list(module.parameters()), 1 - self.decay)

    @torch.no_grad()
    def on_validation_start(self, trainer, module):
        self.trained = [p.detach().clone() for p in module.parameters()]
        torch._foreach_copy_(list(module.parameters()), self.average)

    @torch.no_grad()
    def on_validation_end(self, trainer, module):
        torch._foreach_copy_(list(module.parameters()), self.trained)
        self.trained = None


class Report(Callback):
    def on_train_epoch_end(self, trainer, module):
        if trainer.is_global_zero:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in sorted(trainer.callback_metrics.items()))
            print(f"epoch {trainer.current_epoch}  {shown}", flush=True)


def main():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--out", default="runs/cells")
    parser.add_argument("--resume", default=None, metavar="CKPT")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = CellSegmenter(seed=args.seed)
    data = CellData(seed=args.seed)
    checkpoint = ModelCheckpoint(args.out, "best-{epoch}", monitor="val/iou", mode="max", save_last=True,
                                 enable_version_counter=False)
    trainer = L.Trainer(accelerator=args.accelerator, devices=2, strategy="ddp", max_epochs=args.epochs,
                        callbacks=[WeightAverage(), Report(), checkpoint], logger=False, num_sanity_val_steps=0,
                        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, data, ckpt_path=args.resume)
    if trainer.is_global_zero:
        print(f"best: {checkpoint.best_model_path}, IoU {checkpoint.best_model_score:.4f}")


if __name__ == "__main__":
    main()
