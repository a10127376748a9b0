"""Train on images with added noise, and validate on a fifth of the data, on any number of devices.

TODO 1: the validation accuracy is too high. On samples that no rank has trained on, the accuracy is lower.
Find the cause and repair it.

Run it:    02_pytorch_ddp/exercise4_run_find_the_bug_leak.sh
Check it:  ./workshop.sh check 02_pytorch_ddp/exercise4_find_the_bug_leak.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int
from workshop.training.models import SmallCNN

SEED = 42


@record
def main():
    args = parse_arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(rank, world_size, device, args)
    finally:
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=3, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="samples per batch and process")
    args = parser.parse_args()
    check_arguments(parser, args, world_size=int(os.environ.get("WORLD_SIZE", 0)))
    return args


def choose_device(local_rank):
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())  # 0 if only one GPU is visible
    return torch.accelerator.current_accelerator()


def train(rank, world_size, device, args):
    torch.manual_seed(SEED + rank)  # different noise on each rank; DDP broadcasts the initial parameters of rank 0
    model = DDP(SmallCNN().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, _ = load_dataset("digits")
    # Train on four fifths of the data. The rest is the validation set, for choosing between models.
    train_set, validation_set = random_split(data, [0.8, 0.2])
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    share = Subset(validation_set, range(rank, len(validation_set), world_size))
    validation_loader = DataLoader(share, args.batch_size)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, train_loader, optimizer, device)
        accuracy = evaluate(model.module, validation_loader, device)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} | validation accuracy {accuracy:.2%}", flush=True)


def train_one_epoch(model, loader, optimizer, device):
    """Take one optimizer step per batch, with noise added to its images."""
    model.train()
    for images, labels in loader:
        images = images.to(device)
        images = images + 0.1 * torch.randn_like(images)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels.to(device)).backward()
        optimizer.step()


@torch.inference_mode()
def evaluate(model, loader, device):
    """Return the accuracy over the whole validation set, between 0 and 1."""
    model.eval()
    correct_and_total = torch.zeros(2, device=device)
    for images, labels in loader:
        correct_and_total[0] += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        correct_and_total[1] += len(labels)
    dist.all_reduce(correct_and_total)
    correct, total = correct_and_total.tolist()
    return correct / total


if __name__ == "__main__":
    main()
