"""Train a small CNN on handwritten digits on any number of devices: Lightning's Trainer runs the loop, and the processes.
It saves a checkpoint after each epoch and, started again, carries on from it as if it had never stopped.

Delivered is 01_single_gpu/single_gpu.py in other clothes: the model is a LightningModule, the loaders are those of a
LightningDataModule, and a loop written by hand trains with them on one device. Four steps make it Lightning's.

Runs:         ./exercise1_run_lightning_mnist.sh --epochs 3
Check:        ./workshop.sh check 03_pytorch_lightning/exercise1_lightning_mnist.py
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
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples a step, on each process")
    parser.add_argument("--devices", type=positive_int, default=torch.accelerator.device_count() or 2, help="processes")
    parser.add_argument("--snapshot", default="runs/lightning_mnist.ckpt", help="file to save to and to carry on from")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist once it has been fetched")
    args = parser.parse_args()
    check_launcher(parser, args.devices)
    check_arguments(parser, args, Classifier(), world_size=args.devices)
    return args


def choose_accelerator(devices):
    # Lightning's "auto" takes the GPU wherever there is one, and fails where there are fewer than devices.
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= devices:
        return "auto"
    return "cpu"


class Classifier(L.LightningModule):
    """The model, and what one step of its training and of its evaluation is."""

    def __init__(self):
        super().__init__()
        self.model = SmallCNN()
        # TODO 3: a metric that counts hits and samples, and that adds up the counts of all processes at the end of an epoch.
        # Look up: torchmetrics.classification.MulticlassAccuracy (its average="micro" is hits / samples)

    # TODO 1: what the loop below does with a batch: return the loss. And which optimizer it takes: return it. The Trainer moves
    # the batch to its device, and calls zero_grad(), backward() and step() itself.
    # Look up: LightningModule.training_step(batch, batch_index), LightningModule.configure_optimizers()

    def forward(self, images):
        return self.model(images)

    # TODO 3: what a batch of the test set is for: to update the metric, and to log it as "accuracy" (the metric itself, not its
    # value: only then Lightning knows when to add up). Look up: LightningModule.validation_step, self.log


class Data(L.LightningDataModule):
    """The data sets, and the loader of each process."""

    def __init__(self, dataset, batch_size):
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size

    def setup(self, stage):
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
        self.train_set, self.test_set = load_dataset(self.dataset, transform)

    def train_dataloader(self):
        # TODO 3: the share of this process, dealt out as in stage 02, because Lightning will not do it any more (see below).
        # Look up: self.trainer.global_rank, self.trainer.world_size; DistributedSampler(..., seed=SEED, drop_last=True)
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        # TODO 3: each sample of the test set on one process, and on one only. Look up: Subset, range(first, end, step)
        return DataLoader(self.test_set, self.batch_size)


def train(args):
    L.seed_everything(SEED, verbose=False)  # the same first weights in every process and every run
    # TODO 4: the folder and the name of the checkpoint: ModelCheckpoint adds ".ckpt" itself. Look up: os.path.split, splitext
    trainer = L.Trainer(
        max_epochs=args.epochs,
        # TODO 2: args.devices processes, each with a device of its own, or all on the CPU where there are fewer GPUs; gradients
        # averaged by DistributedDataParallel. Look up: choose_accelerator above; Trainer(accelerator=, devices=, strategy=)
        accelerator="cpu",
        devices=1,
        enable_model_summary=False,
        # TODO 3: Lightning gives each loader a DistributedSampler, which counts some test samples twice to give each process as
        # many. Tell it that Data deals out the samples itself. Look up: Trainer(use_distributed_sampler=)
        enable_progress_bar=False,
        # TODO 4: at the end of each epoch a checkpoint, in that folder, of that name. Look up: ModelCheckpoint(dirpath, filename,
        # save_on_train_epoch_end=True), as one more callback
        callbacks=[EpochReport(args.snapshot)],
        enable_checkpointing=False,
        logger=False,
        num_sanity_val_steps=0,
    )
    snapshot = None
    # TODO 4: carry on from the checkpoint, if there is one.
    data = Data(args.dataset, args.batch_size)
    # TODO 1: let the Trainer do it, from the checkpoint `snapshot`, and remove the loop by hand below.
    # Look up: Trainer.fit(model, datamodule=, ckpt_path=)
    train_by_hand(Classifier(), data, args)


def train_by_hand(module, data, args):  # TODO 1: the Trainer does all of this
    import time

    from workshop.training.logs import EpochLog

    data.setup("fit")
    train_loader, test_loader = data.train_dataloader(), data.val_dataloader()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    log = EpochLog(args.snapshot, args.epochs, "cpu", processes=1)
    print("training on cpu, by hand")
    for epoch in range(args.epochs):
        start, losses = time.perf_counter(), []
        module.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        samples_per_second = len(losses) * args.batch_size / (time.perf_counter() - start)

        module.eval()
        with torch.inference_mode():
            hits = sum((module(images).argmax(dim=1) == labels).sum().item() for images, labels in test_loader)
        log.write(epoch, losses, hits / len(data.test_set), samples_per_second)


if __name__ == "__main__":
    main()
