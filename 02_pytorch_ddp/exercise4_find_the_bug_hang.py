"""Train on any number of devices until the loss of a batch is low enough.

TODO 1: the program trains for some steps and then hangs, until the process group times out after 30 seconds.
Find the cause and repair it.

Run it:    02_pytorch_ddp/exercise4_run_find_the_bug_hang.sh
Check it:  ./workshop.sh check 02_pytorch_ddp/exercise4_find_the_bug_hang.py
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int
from workshop.training.models import SmallCNN

SEED = 42


@record
def main():
    args = parse_arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timedelta(seconds=30))
    try:
        train(rank, world_size, device, args)
    finally:
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=3, help="passes over the training set")
    parser.add_argument(
        "--target", type=float, default=0.5, help="stop as soon as the loss of a batch is below this value"
    )
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
    train_set, _ = load_dataset("digits")
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss, steps = train_until(args.target, model, loader, optimizer, device)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} | last loss {loss:.4f} | {steps} steps", flush=True)
        if loss < args.target:
            break
    dist.barrier()  # wait until all ranks have finished


def train_until(target, model, loader, optimizer, device):
    """Take one optimizer step per batch until the loss is below the target; return the last loss and the number of steps."""
    steps = 0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        steps += 1
        if loss.item() < target:
            break
    return loss.item(), steps


if __name__ == "__main__":
    main()
