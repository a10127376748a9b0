"""Train on data that is stored in shards, on any number of devices.

TODO 1: as a job on two nodes, the program hangs. Find the cause with `workshop diagnose`, and repair it.

Run it:    ./workshop.sh submit slurm-multinode/launch_stands_still_2N2G.sh -- exercise5_stands_still_shards.py
Check it:  ./workshop.sh check slurm-multinode/exercise5_stands_still_shards.py
"""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int
from workshop.training.models import SmallCNN

SEED = 42
SHARDS = 7


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
    torch.manual_seed(SEED)
    model = DDP(SmallCNN().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, _ = load_dataset("digits")
    # Each rank reads whole shards: rank 0 the shards 0, 2, 4 and 6 of 7, and rank 1 the shards 1, 3 and 5.
    mine = [index for shard in range(rank, SHARDS, world_size) for index in range(shard, len(data), SHARDS)]
    loader = DataLoader(Subset(data, mine), args.batch_size, shuffle=True)
    for epoch in range(args.epochs):
        start = time.perf_counter()
        loss = train_one_epoch(model, loader, optimizer, device)
        dist.barrier()  # the time of an epoch is that of the slowest rank
        if rank == 0:
            seconds = time.perf_counter() - start
            print(f"epoch {epoch + 1}/{args.epochs} | loss of rank 0 {loss:.4f} | {seconds:.1f} s", flush=True)


def train_one_epoch(model, loader, optimizer, device):
    """Take one optimizer step per batch and return the mean loss of this rank."""
    total, steps = 0.0, 0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
        steps += 1
    return total / steps


if __name__ == "__main__":
    main()
