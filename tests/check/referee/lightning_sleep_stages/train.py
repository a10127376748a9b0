"""Sleep stages from short EEG-like windows with a Lightning module: convolution + GRU, EMA of the weights as a callback, best model by validation loss.

One data set has the recordings of several people, and a part of it is for validation. A second start with the same arguments resumes from last.ckpt.

    torchrun --nproc-per-node=2 train.py
"""
import argparse
import math
import os
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy, MulticlassCohenKappa

STAGES = 4


def make_windows(people=40, each=27, length=120, seed=6):
    """Two-channel windows: each stage is a mixture of rhythms; amplitude and noise differ from person to person. Some windows are not scored (-1)."""
    g = torch.Generator().manual_seed(seed)
    n = people * each
    stage = torch.randint(0, STAGES, (n,), generator=g)
    gain = (0.6 + 0.8 * torch.rand(people, generator=g)).repeat_interleave(each)
    t = torch.arange(length) / 60
    low, high = torch.tensor([1.5, 3., 6., 9.])[stage], torch.tensor([14., 11., 18., 22.])[stage]
    low, high = (f * (1 + 0.12 * torch.randn(n, generator=g)) for f in (low, high))
    phase = 6.283 * torch.rand(n, 2, 2, 1, generator=g)
    slow = torch.sin(6.283 * low[:, None, None] * t + phase[:, 0])
    fast = torch.sin(6.283 * high[:, None, None] * t + phase[:, 1])
    x = gain[:, None, None] * (slow + 0.4 * fast) + 0.9 * torch.randn(n, 2, length, generator=g)
    stage[torch.rand(n, generator=g) < 0.08] = -1
    return TensorDataset(x, stage)


class SleepData(L.LightningDataModule):
    def __init__(self, batch, world):
        super().__init__()
        self.batch, self.world = batch, world

    def setup(self, stage=None):
        windows = make_windows()
        self.train_set, self.val_set = random_split(windows, [840, 240], generator=torch.Generator().manual_seed(15))

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch // self.world, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=60 // self.world)


class Net(nn.Module):
    def __init__(self, width=24, dropout=0.1):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(2, width, 9, stride=4, padding=4), nn.GroupNorm(4, width), nn.GELU(),
                                   nn.Conv1d(width, width, 5, stride=2, padding=2), nn.GELU())
        self.gru, self.drop, self.head = nn.GRU(width, width, batch_first=True), nn.Dropout(dropout), nn.Linear(width, STAGES)

    def forward(self, x):
        return self.head(self.drop(self.gru(self.front(x).transpose(1, 2))[0].mean(1)))


class SleepModule(L.LightningModule):
    def __init__(self, lr=8e-3, dropout=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = Net(dropout=dropout)
        self.kappa = MulticlassCohenKappa(STAGES, ignore_index=-1)
        self.accuracy = MulticlassAccuracy(STAGES, average="micro", ignore_index=-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: min((s + 1) / (0.1 * total), 0.5 * (1 + math.cos(math.pi * min(s / total, 1)))))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch, index):
        torch.manual_seed(1000 * (self.global_step + 1) + self.global_rank)  # noise and dropout: other on every rank, the same after a restart
        x, y = batch
        x = x + 0.1 * torch.randn_like(x) if self.hparams.dropout else x
        scored = self.all_gather((y >= 0).sum()).sum()
        # DDP averages over ranks: the sum over all scored windows is divided by their number on all ranks
        loss = F.cross_entropy(self.net(x), y, ignore_index=-1, reduction="sum") * self.trainer.world_size / scored
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return loss

    def on_validation_epoch_start(self):
        self.sums = torch.zeros(2, device=self.device)

    def validation_step(self, batch, index):
        x, y = batch
        logits = self.net(x)
        self.sums += torch.stack([F.cross_entropy(logits, y, ignore_index=-1, reduction="sum"), (y >= 0).sum()])
        self.kappa.update(logits, y)
        self.accuracy.update(logits, y)

    def on_validation_epoch_end(self):
        total, count = self.all_gather(self.sums).view(-1, 2).sum(0)
        self.log("val_loss", total / count, rank_zero_only=False, sync_dist=True)
        values = {"kappa": self.kappa.compute(), "accuracy": self.accuracy.compute()}
        self.log_dict(values)
        self.kappa.reset()
        self.accuracy.reset()
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch}: step {self.global_step}, validation loss {total / count:.4f}, "
                  f"kappa {values['kappa']:.4f}, accuracy {values['accuracy']:.4f}", flush=True)


class WeightAverage(Callback):
    """Moving average of the weights, used for validation and kept in the checkpoint as the callback's own state."""

    def __init__(self, decay=0.95):
        self.decay, self.shadow, self.backup = decay, None, None

    def on_fit_start(self, trainer, module):
        if self.shadow is None:
            self.shadow = {k: v.detach().clone() for k, v in module.net.state_dict().items()}
        self.shadow = {k: v.to(module.device) for k, v in self.shadow.items()}

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        for k, v in module.net.state_dict().items():
            self.shadow[k].lerp_(v, 1 - self.decay)

    def on_validation_start(self, trainer, module):
        self.backup = {k: v.detach().clone() for k, v in module.net.state_dict().items()}
        module.net.load_state_dict(self.shadow)

    def on_validation_end(self, trainer, module):
        module.net.load_state_dict(self.backup)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=84, help="windows per step over all ranks")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--out", default="out")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")

    world, here = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    L.seed_everything(21, verbose=False)
    module = SleepModule(dropout=args.dropout)
    average = WeightAverage()
    best = ModelCheckpoint(args.out, filename="best-{epoch}", monitor="val_loss", save_last=True)
    trainer = L.Trainer(accelerator="auto", devices=here, num_nodes=world // here, strategy="ddp" if world > 1 else "auto", max_epochs=args.epochs,
                        callbacks=[average, best], gradient_clip_val=1.0, logger=False, enable_progress_bar=False, enable_model_summary=False,
                        num_sanity_val_steps=0)
    last = os.path.join(args.out, "last.ckpt")
    trainer.fit(module, datamodule=SleepData(args.batch, world), ckpt_path=last if os.path.exists(last) else None)
    if trainer.is_global_zero:
        print(f"best validation loss {best.best_model_score:.4f}", flush=True)


if __name__ == "__main__":
    main()
