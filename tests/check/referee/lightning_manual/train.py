"""Adversarial autoencoder for spectra: two optimizers by hand (manual optimization), data from a stream of shards."""
import argparse
import os

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

CHANNELS = 64


def measure(n, seed):
    """Spectra with a wide and a narrow line on a slope, and a bit of noise."""
    g = torch.Generator().manual_seed(seed)
    channel = torch.linspace(0, 1, CHANNELS)
    wide, narrow = torch.rand(n, 1, generator=g), 0.2 + 0.6 * torch.rand(n, 1, generator=g)
    height = 0.5 + torch.rand(n, 1, generator=g)
    spectra = torch.exp(-((channel - wide) / 0.2) ** 2) + height * torch.exp(-((channel - narrow) / 0.05) ** 2)
    return spectra + 0.3 * channel * torch.randn(n, 1, generator=g) + 0.03 * torch.randn(n, CHANNELS, generator=g)


class SpectraStream(IterableDataset):
    """Shard after shard in an order that changes with the epoch; Lightning does not divide iterable data sets."""

    def __init__(self, shards, shard_size, epoch, rank, world_size):
        self.shards, self.shard_size, self.epoch = shards, shard_size, epoch
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = torch.randperm(self.shards, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for shard in order[self.rank * workers + worker::self.world_size * workers]:
            yield from measure(self.shard_size, seed=shard)


class SpectraModule(L.LightningDataModule):
    def __init__(self, batch_size, shards=16, shard_size=96):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.val_set = TensorDataset(measure(256, seed=10_000))

    def train_dataloader(self):
        stream = SpectraStream(self.hparams.shards, self.hparams.shard_size, self.trainer.current_epoch,
                               self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(stream, self.hparams.batch_size, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, 64)


def mlp(*sizes):
    layers = []
    for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
        layers += [nn.Linear(a, b)] + ([nn.LeakyReLU(0.2)] if i < len(sizes) - 2 else [])
    return nn.Sequential(*layers)


class AdversarialAutoencoder(L.LightningModule):
    def __init__(self, code=4, lr=5e-3, weight=0.02, seed=0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.encoder, self.decoder = mlp(CHANNELS, 96, 48, code), mlp(code, 48, 96, CHANNELS)
        self.critic = mlp(code, 48, 48, 1)

    def on_train_epoch_start(self):
        # every process draws samples of its own from the prior
        torch.manual_seed(self.hparams.seed + 1000 * self.current_epoch + self.global_rank)

    def training_step(self, batch, batch_idx):
        opt_auto, opt_critic = self.optimizers()

        self.toggle_optimizer(opt_auto)
        code = self.encoder(batch)
        reconstruction = F.mse_loss(self.decoder(code), batch)
        fooled = F.softplus(-self.critic(code)).mean()
        opt_auto.zero_grad()
        self.manual_backward(reconstruction + self.hparams.weight * fooled)
        self.clip_gradients(opt_auto, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_auto.step()
        self.untoggle_optimizer(opt_auto)

        self.toggle_optimizer(opt_critic)
        prior = torch.randn_like(code)
        critic_loss = (F.softplus(-self.critic(prior)) + F.softplus(self.critic(code.detach()))).mean()
        opt_critic.zero_grad()
        self.manual_backward(critic_loss)
        opt_critic.step()
        self.untoggle_optimizer(opt_critic)
        self.log_dict({"reconstruction": reconstruction, "critic": critic_loss}, on_step=False, on_epoch=True,
                      sync_dist=True, batch_size=len(batch))

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch, batch_idx):
        (spectra,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(spectra)), spectra)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(spectra))

    def configure_optimizers(self):
        auto = torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=self.hparams.lr)
        critic = torch.optim.Adam(self.critic.parameters(), lr=self.hparams.lr / 2, betas=(0.5, 0.9))
        return [auto, critic], [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (auto, critic)]


class KeepBest(L.Callback):
    def __init__(self, path):
        self.path, self.best = path, float("inf")

    def on_validation_end(self, trainer, module):
        loss = trainer.callback_metrics["val_loss"].item()
        if loss < self.best:
            self.best = loss
            trainer.save_checkpoint(self.path)

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per device")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    best, last = KeepBest(os.path.join(args.out, "best.ckpt")), os.path.join(args.out, "last.ckpt")
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu", devices=args.devices,
        strategy="ddp_find_unused_parameters_true",  # each backward leaves out the other networks
        max_epochs=args.epochs, reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0, log_every_n_steps=10,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=args.out,
        logger=CSVLogger(args.out, name="logs"),
        callbacks=[best, ModelCheckpoint(args.out, filename="epoch", save_last=True, enable_version_counter=False)],
    )
    trainer.fit(AdversarialAutoencoder(), SpectraModule(args.batch_size),
                ckpt_path=last if args.resume and os.path.exists(last) else None)
    trainer.print({name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()},
                  f"best validation loss {best.best:.4f}")


if __name__ == "__main__":
    main()
