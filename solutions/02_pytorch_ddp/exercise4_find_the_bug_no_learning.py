"""Train a model to tell odd digits from even digits, on any number of devices.

The model has one output per sample, so the loss is the binary cross-entropy.

N processes:  torchrun --standalone --nproc-per-node=2 solutions/02_pytorch_ddp/exercise4_find_the_bug_no_learning.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int

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
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DDP(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_set, _ = load_dataset("digits")
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss, accuracy = train_one_epoch(model, loader, optimizer, device)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy:.2%}", flush=True)


def train_one_epoch(model, loader, optimizer, device):
    """Take one optimizer step per batch and return the mean loss and the accuracy over the samples of the epoch."""
    loss_correct_total = torch.zeros(3, device=device)
    for images, digits in loader:
        images, is_odd = images.to(device), (digits % 2).to(device, torch.float32)
        optimizer.zero_grad()
        outputs = model(images).squeeze(1)  # one number per sample; above 0 means odd
        # With one output, use a loss for yes-or-no questions. cross_entropy would treat the output as the only class: its
        # probability is always 1, so the loss and all gradients are 0.
        loss = F.binary_cross_entropy_with_logits(outputs, is_odd)
        loss.backward()
        optimizer.step()
        loss_correct_total[0] += loss.detach() * len(digits)
        loss_correct_total[1] += ((outputs > 0) == is_odd.bool()).sum()
        loss_correct_total[2] += len(digits)
    dist.all_reduce(loss_correct_total)
    loss, correct, total = loss_correct_total.tolist()
    return loss / total, correct / total


if __name__ == "__main__":
    main()
