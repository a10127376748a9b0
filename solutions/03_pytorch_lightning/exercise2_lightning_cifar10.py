"""Train a ResNet-18 with Lightning in bfloat16, with a one-cycle learning rate, on any number of nodes, under any launcher.
It saves a checkpoint after each epoch. If you start it again, it resumes, as if it had never been stopped.

One process:  python solutions/03_pytorch_lightning/exercise2_lightning_cifar10.py --devices 1
N processes:  python solutions/03_pytorch_lightning/exercise2_lightning_cifar10.py --devices 2      (or torchrun starts them)
Slurm:        srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=2 python ... --nodes 2 --devices 4
"""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchmetrics.classification import MulticlassAccuracy
from torchvision import transforms

from workshop.data import load_dataset
from workshop.tensors import bf16_is_fast
from workshop.training import models
from workshop.training.arguments import ArgumentParser, check_arguments, check_launcher, positive_int
from workshop.training.lightning import EpochReport

SEED = 42


def main():
    args = parse_arguments()
    train(args)


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples per batch and process")
    parser.add_argument("--accumulate", type=positive_int, default=1, help="batches per step")
    parser.add_argument(
        "--devices", type=positive_int, default=torch.accelerator.device_count() or 2, help="processes per node"
    )
    parser.add_argument("--nodes", type=positive_int, default=1)
    parser.add_argument(
        "--checkpoint", default="runs/lightning_cifar10.ckpt", help="file to save to and to resume from"
    )
    parser.add_argument("--dataset", default="digits", help="digits, or cifar10 once it has been fetched")
    args = parser.parse_args()
    check_launcher(parser, args.devices, args.nodes)
    model = Classifier(args.dataset)
    check_arguments(parser, args, model, world_size=args.devices * args.nodes, datasets=("digits", "cifar10"))
    return args


def choose_accelerator():
    # Lightning's "auto" chooses the GPU if there is one, and fails if there are fewer GPUs than processes.
    if torch.accelerator.is_available():
        return "auto"
    return "cpu"


def choose_environment():
    """Return the environment of the launcher: torchrun or srun if one of them started this process, else Lightning itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return TorchElasticEnvironment()
    # Do not test whether this is a Slurm job: a Jupyter session may be one, and passes on its variables, such as
    # SLURM_NTASKS=1.
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return SLURMEnvironment()
    return LightningEnvironment()


class Classifier(L.LightningModule):
    """The model, and one step of its training and of its evaluation."""

    def __init__(self, dataset):
        super().__init__()
        width = 64 if dataset == "cifar10" else 16
        self.model = models.ResNet18(width)
        # The stem of the ResNet paper reduces 32 x 32 pixels to 8 x 8. This one keeps the full resolution.
        self.model.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        # Counts correct predictions and samples. At the end of an epoch, it adds up the counts of all processes.
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch, batch_index):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        # The number of optimizer steps of the whole run. It depends on the epochs, the processes and the accumulation.
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def forward(self, images):
        return self.model(images)

    def validation_step(self, batch, batch_index):
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("accuracy", self.accuracy)


class Data(L.LightningDataModule):
    """The data sets, and the loaders of each process."""

    def __init__(self, dataset, batch_size):
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size

    def setup(self, stage):
        to_rgb = transforms.Lambda(lambda image: image.convert("RGB").resize((32, 32)))
        transform = transforms.Compose([to_rgb, transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
        self.train_set, self.test_set = load_dataset(self.dataset, transform)

    def train_dataloader(self):
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        sampler = DistributedSampler(self.train_set, world_size, rank, seed=SEED, drop_last=True)
        return DataLoader(self.train_set, self.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self):
        # Distribute the samples by hand, because DistributedSampler repeats some of them to give each rank the same number.
        share = range(self.trainer.global_rank, len(self.test_set), self.trainer.world_size)
        return DataLoader(Subset(self.test_set, share), self.batch_size)


def train(args):
    L.seed_everything(SEED, verbose=False)  # the same initial parameters in every process and every run
    folder, name = os.path.split(os.path.splitext(args.checkpoint)[0])
    accelerator = choose_accelerator()
    device = torch.accelerator.current_accelerator() if accelerator == "auto" else torch.device("cpu")
    precision = "bf16-mixed" if bf16_is_fast(device) else "32-true"
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator=accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        plugins=[choose_environment()],
        strategy="ddp",
        precision=precision,
        accumulate_grad_batches=args.accumulate,
        use_distributed_sampler=False,  # Data distributes the samples itself
        callbacks=[
            EpochReport(args.checkpoint),
            EarlyStopping("accuracy", mode="max", patience=5),
            LearningRateMonitor("step"),
            ThroughputMonitor(batch_size_fn=lambda batch: len(batch[1]), window_size=10),
            DeviceStatsMonitor(),
            ModelCheckpoint(folder or ".", f"{name}-best", monitor="accuracy", mode="max"),
            ModelCheckpoint(folder or ".", name, save_on_train_epoch_end=True),
        ],
        logger=CSVLogger(folder or ".", name=f"{name}-metrics"),
        log_every_n_steps=1 if args.dataset == "digits" else 50,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    checkpoint = args.checkpoint if os.path.exists(args.checkpoint) else None
    data = Data(args.dataset, args.batch_size)
    trainer.fit(Classifier(args.dataset), data, ckpt_path=checkpoint)


if __name__ == "__main__":
    main()
