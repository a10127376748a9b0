"""Train a small CNN on handwritten digits with Lightning, whose Trainer starts the processes and runs the loop.
It saves a checkpoint after each epoch. If you start it again, it resumes, as if it had never been stopped.

One process:  python solutions/03_pytorch_lightning/exercise1_lightning_mnist.py --devices 1
N processes:  python solutions/03_pytorch_lightning/exercise1_lightning_mnist.py --devices 2
Slurm:        srun --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=2 python ... --devices 4     (one task per GPU)
"""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchmetrics.classification import MulticlassAccuracy
from torchvision import transforms

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, check_launcher, positive_int
from workshop.training.lightning import EpochReport
from workshop.training.models import SmallCNN

SEED = 42


def main():
    args = parse_arguments()
    train(args)


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples per batch and process")
    parser.add_argument(
        "--devices", type=positive_int, default=torch.accelerator.device_count() or 2, help="number of processes"
    )
    parser.add_argument("--checkpoint", default="runs/lightning_mnist.ckpt", help="file to save to and to resume from")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist after ./workshop.sh fetch mnist")
    args = parser.parse_args()
    check_launcher(parser, args.devices)
    check_arguments(parser, args, Classifier(), world_size=args.devices)
    return args


def choose_accelerator():
    # Lightning's "auto" chooses the GPU if there is one, and fails if there are fewer GPUs than processes.
    if torch.accelerator.is_available():
        return "auto"
    return "cpu"


class Classifier(L.LightningModule):
    """The model, and one step of its training and of its evaluation."""

    def __init__(self):
        super().__init__()
        self.model = SmallCNN()
        # Counts correct predictions and samples. At the end of an epoch, it adds up the counts of all processes.
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch, batch_index):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self):
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
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator=choose_accelerator(),
        devices=args.devices,
        strategy="ddp",
        enable_model_summary=False,
        use_distributed_sampler=False,  # Data distributes the samples itself
        enable_progress_bar=False,
        callbacks=[EpochReport(args.checkpoint), ModelCheckpoint(folder or ".", name, save_on_train_epoch_end=True)],
        logger=False,
        num_sanity_val_steps=0,
    )
    checkpoint = args.checkpoint if os.path.exists(args.checkpoint) else None
    data = Data(args.dataset, args.batch_size)
    trainer.fit(Classifier(), data, ckpt_path=checkpoint)


if __name__ == "__main__":
    main()
