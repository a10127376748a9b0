"""Save a checkpoint after each epoch and resume from it, on any number of devices.

A run that was stopped and resumed ends with the parameters of an uninterrupted run.

N processes:  torchrun --standalone --nproc-per-node=2 solutions/02_pytorch_ddp/exercise4_find_the_bug_restart.py
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
    parser.add_argument("--checkpoint", default="runs/restart.pt", help="file to save to and to resume from")
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
    model = SmallCNN().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first_epoch = 0
    if os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1
    ddp_model = DDP(model)
    train_set, _ = load_dataset("digits")
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(ddp_model, loader, optimizer, device)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} | loss {loss:.4f}", flush=True)
            save_checkpoint(args.checkpoint, model, optimizer, epoch)


def train_one_epoch(model, loader, optimizer, device):
    """Take one optimizer step per batch and return the mean loss."""
    total = torch.zeros((), device=device)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    total /= len(loader)
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total.item()


def save_checkpoint(path, model, optimizer, epoch):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    # Save everything that the next step depends on, including the momentum in the optimizer state.
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path + ".tmp")
    os.replace(path + ".tmp", path)


if __name__ == "__main__":
    main()
