"""Exercise 2: train a ResNet-18 with Lightning in bfloat16, with a one-cycle learning rate, on many nodes, under any launcher.
It saves a checkpoint after each epoch. If you start it again, it resumes, as if it had never been stopped.

As delivered, this is the solution of exercise 1 with two more options that it does not use yet: --accumulate and --nodes.
It works as delivered. Do the TODOs in order, and the steps of each TODO in the order of their letters.

Run:          ./exercise2_run_lightning_cifar10.sh --epochs 3
Check:        ./workshop.sh check 03_pytorch_lightning/exercise2_lightning_cifar10.py
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
    # TODO 5, step a: return an object that tells Lightning which launcher has started this process. There are three cases:
    # torchrun, which sets TORCHELASTIC_RUN_ID; srun with several tasks, if SLURM_STEP_NUM_TASKS is greater than 1; otherwise
    # Lightning itself. Without this object, Lightning assumes in every Slurm job that srun starts the processes. A Jupyter
    # session is often a job with one task: there, Lightning would wait for processes that srun never starts.
    # Look up: TorchElasticEnvironment, SLURMEnvironment, LightningEnvironment
    return None


class Classifier(L.LightningModule):
    """The model, and one step of its training and of its evaluation."""

    def __init__(self, dataset):
        super().__init__()
        # TODO 1, step a: use a ResNet-18, with width 64 for cifar10 and width 16 for the digits. Its stem, the first layers, is
        # made for 224 x 224 pixels: it reduces 32 x 32 pixels to 8 x 8. Replace the stem with one that keeps all pixels: a 3 x 3
        # convolution to `width` channels without bias, a BatchNorm and a ReLU, without pooling.
        # Look up: models.ResNet18 and its attribute stem; nn.Sequential
        self.model = models.SmallCNN()
        # Counts correct predictions and samples. At the end of an epoch, it adds up the counts of all processes.
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch, batch_index):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self):
        # TODO 3, step a: return the optimizer and a learning-rate schedule: one cycle over all steps of the run, up to 4e-3 and
        # down to almost zero at the last step. By default, Lightning steps a schedule once per epoch; this one needs every step.
        # Look up: torch.optim.lr_scheduler.OneCycleLR, Trainer.estimated_stepping_batches; in Lightning's documentation
        # under configure_optimizers: "lr_scheduler", "interval"
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

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
        # TODO 1, step b: convert each image to three channels and 32 x 32 pixels, as in cifar10. Normalize needs one mean and
        # one standard deviation per channel.
        # Look up: transforms.Lambda; convert("RGB") and resize of a PIL image
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
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
    # TODO 2: compute in bfloat16 ("bf16-mixed") if the device is faster in it than in float32. The device is the accelerator
    # of this machine if `accelerator` is "auto", and the CPU otherwise.
    # Look up: bf16_is_fast(device), torch.accelerator.current_accelerator()
    precision = "32-true"
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator=accelerator,
        devices=args.devices,
        # TODO 5, step b: tell the Trainer the number of nodes, and which launcher has started the processes (step a).
        # Look up: Trainer(num_nodes=, plugins=)
        strategy="ddp",
        precision=precision,
        # TODO 3, step b: take one optimizer step per args.accumulate batches. Look up: Trainer(accumulate_grad_batches=)
        use_distributed_sampler=False,  # Data distributes the samples itself
        # TODO 4, step a: keep a second checkpoint, f"{name}-best", of the epoch with the highest accuracy.
        # Look up: ModelCheckpoint(monitor=, mode=)
        # Step b: end the training when the accuracy has not risen for 5 epochs. Look up: EarlyStopping(patience=)
        # Step c: measure the learning rate of each step, the speed and the state of the device.
        # Look up: LearningRateMonitor, ThroughputMonitor(batch_size_fn=, window_size=), DeviceStatsMonitor
        # Step d: log these values to a table, in the folder f"{name}-metrics" beside the checkpoint.
        # Look up: CSVLogger(save_dir, name=)
        callbacks=[EpochReport(args.checkpoint), ModelCheckpoint(folder or ".", name, save_on_train_epoch_end=True)],
        logger=False,
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
