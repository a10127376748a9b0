"""Train with workers that report the brightness of each image, on any number of devices.

TODO 1: as a job on two nodes, the program hangs. Find the cause with `workshop diagnose`, and repair it.

Run it:    ./workshop.sh submit slurm-multinode/launch_stands_still_2N2G.sh -- exercise5_stands_still_workers.py
Check it:  ./workshop.sh check slurm-multinode/exercise5_stands_still_workers.py
"""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

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


class Measured(Dataset):
    """Images whose brightness is reported: each worker puts it into a queue, from which the main process reads it."""

    def __init__(self, data, most):
        self.data, self.brightness = data, mp.Queue(maxsize=most)  # without a limit, it could fill the memory

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        self.brightness.put(image.mean().item())
        return image, label


def train(rank, world_size, device, args):
    torch.manual_seed(SEED)
    model = DDP(SmallCNN().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Measured(load_dataset("digits")[0], most=4 * args.batch_size)
    sampler = DistributedSampler(data, seed=SEED, drop_last=True)
    loader = DataLoader(
        data, args.batch_size, sampler=sampler, drop_last=True, num_workers=1, multiprocessing_context="fork"
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        brightness = train_one_epoch(rank, model, loader, optimizer, device)
        if rank == 0:
            seconds = time.perf_counter() - start
            print(f"epoch {epoch + 1}/{args.epochs} | brightness {brightness:.3f} | {seconds:.1f} s", flush=True)


def train_one_epoch(rank, model, loader, optimizer, device):
    """Take one optimizer step per batch, and return the mean brightness of the images."""
    total, count = 0.0, 0
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
        optimizer.step()
        if rank == 0:  # only rank 0 prints the brightness
            for _ in range(len(images)):
                total += loader.dataset.brightness.get()
                count += 1
    return total / max(1, count)


if __name__ == "__main__":
    main()
