"""Exercise 1: train a small CNN with Lightning, whose Trainer starts the processes and runs the loop, on any number of devices.

As delivered, this is 01_single_gpu/single_gpu.py without checkpoints, divided into the classes that Lightning expects: the
model is a LightningModule, the loaders belong to a LightningDataModule, and a loop that was written by hand trains on one
device. After TODO 4, it saves a checkpoint after each epoch. Started again, it resumes from the checkpoint and ends with the
same result as an uninterrupted run.
It works as delivered. Do the TODOs in order, and the steps of each TODO in the order of their letters.

Run:          ./exercise1_run_lightning_mnist.sh --epochs 3
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
        # TODO 3, step a: create a metric that counts hits and samples. At the end of an epoch, it sums the counts over all
        # ranks before it divides, so the accuracy is that of the whole test set.
        # Look up: torchmetrics.classification.MulticlassAccuracy; with average="micro" it computes hits / samples

    # TODO 1, steps a and b: the Trainer needs two methods from you. It does the rest of a step itself: it moves the batch to the
    # device, and calls zero_grad(), backward() and step().
    # Step a: return the loss of one batch, computed as in the loop below.
    # Look up: LightningModule.training_step(batch, batch_index)
    # Step b: return the same optimizer as in the loop below, with the parameters of this module.
    # Look up: LightningModule.configure_optimizers()

    def forward(self, images):
        return self.model(images)

    # TODO 3, step b: update the metric with each batch of the test set, and log it as "accuracy". Log the metric object, not
    # its value, because only the object can sum the counts over all ranks.
    # Look up: LightningModule.validation_step(batch, batch_index), self.log


class Data(L.LightningDataModule):
    """The data sets, and the loaders of each process."""

    def __init__(self, dataset, batch_size):
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size

    def setup(self, stage):
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
        self.train_set, self.test_set = load_dataset(self.dataset, transform)

    def train_dataloader(self):
        # TODO 3, step c: give each rank different samples, with the sampler of stage 02. After step e, Lightning adds none.
        # Look up: self.trainer.global_rank, self.trainer.world_size; DistributedSampler(..., seed=SEED, drop_last=True)
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        # TODO 3, step d: let each rank evaluate a different part of the test set, so that each sample counts exactly once.
        # Look up: Subset, range(start, stop, step)
        return DataLoader(self.test_set, self.batch_size)


def train(args):
    L.seed_everything(SEED, verbose=False)  # the same initial parameters in every process and every run
    # TODO 4, step a: ModelCheckpoint needs the folder and the name of the checkpoint separately, and adds ".ckpt" itself.
    # Divide the path args.checkpoint accordingly.
    # Look up: os.path.splitext, os.path.split
    trainer = L.Trainer(
        max_epochs=args.epochs,
        # TODO 2: train with args.devices processes: each on its own GPU, or all on the CPU of a machine without a GPU.
        # Let DistributedDataParallel average the gradients.
        # Look up: choose_accelerator above; Trainer(accelerator=, devices=, strategy=)
        accelerator="cpu",
        devices=1,
        enable_model_summary=False,
        # TODO 3, step e: by default, Lightning gives each loader a DistributedSampler, which repeats test samples until all
        # ranks have the same number. Switch this off, because Data distributes the samples itself.
        # Look up: Trainer(use_distributed_sampler=)
        enable_progress_bar=False,
        # TODO 4, step b: save a checkpoint at the end of each epoch, in this folder and with this name. Add a callback for
        # it, and remove the argument that forbids checkpoints.
        # Look up: ModelCheckpoint(dirpath, filename, save_on_train_epoch_end=True)
        callbacks=[EpochReport(args.checkpoint)],
        enable_checkpointing=False,
        logger=False,
        num_sanity_val_steps=0,
    )
    checkpoint = None
    # TODO 4, step c: resume from the checkpoint if its file exists. None means that the training starts from the beginning.
    # Look up: os.path.exists
    data = Data(args.dataset, args.batch_size)
    # TODO 1, step c: let the Trainer train the model with this data, and resume from `checkpoint` (None until TODO 4).
    # Look up: Trainer.fit(model, datamodule=, ckpt_path=)
    train_by_hand(Classifier(), data, args)


def train_by_hand(module, data, args):  # TODO 1, step d: remove this function; the Trainer does its work
    import time

    from workshop.training.logs import EpochLog

    data.setup("fit")
    train_loader, test_loader = data.train_dataloader(), data.val_dataloader()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    log = EpochLog(args.checkpoint, args.epochs, "cpu", processes=1)
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
