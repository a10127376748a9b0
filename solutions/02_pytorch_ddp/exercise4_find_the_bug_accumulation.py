"""Train with gradient accumulation (several batches per step) on any number of devices.

Each step uses the same number of batches, and its gradient is the mean of the gradients of these batches.

N processes:  torchrun --standalone --nproc-per-node=2 solutions/02_pytorch_ddp/exercise4_find_the_bug_accumulation.py
"""

import os

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
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(rank, world_size, device, args)
    finally:
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=3, help="passes over the training set")
    parser.add_argument("--accumulate", type=positive_int, default=4, help="batches per step")
    parser.add_argument("--batch-size", type=positive_int, default=16, help="samples per batch and process")
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train_set, _ = load_dataset("digits")
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer, device, args.accumulate)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} | loss {loss:.4f}", flush=True)


def train_one_epoch(model, loader, optimizer, device, accumulate):
    """Take one optimizer step per `accumulate` batches and return the mean loss of the batches."""
    total = torch.zeros((), device=device)
    batches = len(loader) // accumulate * accumulate  # drop the last batches if they do not fill a step
    for step, (images, labels) in zip(range(batches), loader, strict=False):
        is_last = (step + 1) % accumulate == 0
        model.require_backward_grad_sync = is_last  # as no_sync() does: communicate the gradients once per step
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        (loss / accumulate).backward()  # the gradient of the mean loss of the batches, not of the sum
        total += loss.detach()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    total /= batches
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total.item()


if __name__ == "__main__":
    main()
