"""Exercise 1: from one device to all devices of one machine, with mp.spawn and DistributedDataParallel.
It is single_gpu.py, and works. Do the TODOs in order, and run and check it after each: it stays a working program.

Run it:    02_pytorch_ddp/exercise1_run_multigpu.sh --epochs 3
Check it:  ./workshop.sh check 02_pytorch_ddp/exercise1_multigpu.py
"""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset  # TODO 3: RandomSampler goes
from torchvision import transforms
from tqdm import tqdm

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int
from workshop.training.logs import EpochLog
from workshop.training.models import SmallCNN

SEED = 42


def main():
    args = parse_arguments()
    # TODO 1: start args.nproc processes on this machine, each with a device of its own. Each joins one process group with the
    # others, trains, and leaves the group, also after an error. One thread a process is enough (OMP_NUM_THREADS).
    # Look up: torch.multiprocessing.spawn, torch.distributed.TCPStore (port 0: the system picks a free one),
    # init_process_group(backend, store=..., rank=..., world_size=...), get_default_backend_for_device, destroy_process_group
    device = choose_device()
    train(device, args)


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples a step, on each process")
    parser.add_argument("--save-every", type=positive_int, default=1, help="epochs from one snapshot to the next")
    parser.add_argument("--snapshot", default="runs/multigpu.pt", help="file to save to and to carry on from")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist once it has been fetched")
    parser.add_argument("--nproc", type=positive_int, default=torch.accelerator.device_count() or 2, help="processes")
    args = parser.parse_args()
    check_arguments(parser, args, SmallCNN(), world_size=args.nproc)
    return args


# TODO 1: process local_rank of the local_world_size on this machine takes the device with its number; with fewer devices than
# processes, all take the CPU.
# Look up: torch.accelerator.device_count, torch.accelerator.set_device_index
def choose_device():
    # Without is_available() the CUDA build names "cuda" on a machine that has no GPU.
    # TODO 1
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


# TODO 1: train() has to know which process it is (rank), and how many there are (world_size).
def train(device, args):
    torch.manual_seed(SEED)  # the same first weights in every run
    model = SmallCNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first_epoch = load_snapshot(args.snapshot, model, optimizer, device)
    # TODO 1: one process, rank 0, prints and writes; the others keep quiet. The log tells the number of processes.
    log = EpochLog(args.snapshot, args.epochs, device, processes=1)
    print(f"training on {device} from epoch {first_epoch + 1}")

    # TODO 2: let backward() average the gradients over all processes. Train the wrapped model; save and evaluate the plain one.
    # Look up: torch.nn.parallel.DistributedDataParallel
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    # TODO 3: each process trains on a share of its own, in the order of single_gpu.py: seed SEED, and every epoch another order.
    # Look up: torch.utils.data.DistributedSampler, its seed, drop_last and set_epoch
    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    # TODO 4: share the test set out too, so that each sample counts once, also where it does not divide by the processes.
    # Look up: torch.utils.data.Subset (DistributedSampler counts some samples twice to give each process as many)
    test_loader = DataLoader(test_set, args.batch_size)

    for epoch in range(first_epoch, args.epochs):
        # Each epoch is seeded anew, so a resumed run needs no random state from the snapshot.
        # TODO 3: random numbers of its own for each process, an order of its own for each epoch
        torch.manual_seed(SEED + 1000 * epoch)
        sampler.generator.manual_seed(SEED + epoch)
        start = time.perf_counter()
        # TODO 2: train the wrapped model
        losses = train_one_epoch(model, train_loader, optimizer, device)
        seconds = time.perf_counter() - start
        # TODO 4: of all processes together
        samples_per_second = len(losses) * args.batch_size / seconds

        accuracy = evaluate(model, test_loader, device)
        # TODO 1: rank 0 alone
        log.write(epoch, losses, accuracy, samples_per_second)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
            save_snapshot(args.snapshot, model, optimizer, epoch)


def train_one_epoch(model, loader, optimizer, device):
    """Take a step with each batch and return the losses of the steps."""
    model.train()
    losses = torch.zeros(len(loader), device=device)
    # disable=None: a progress bar on a terminal, none in a log file
    # TODO 1: one bar, on rank 0 (disable=True is none at all)
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=None)):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    # TODO 4: the loss of a step is the mean over the global batch, not the one of this process
    # Look up: torch.distributed.all_reduce, ReduceOp.AVG
    return losses.tolist()


@torch.inference_mode()
def evaluate(model, loader, device):
    """Return the accuracy over the whole test set, between 0 and 1."""
    model.eval()
    correct_and_total = torch.zeros(2, device=device)
    for images, labels in loader:
        predictions = model(images.to(device)).argmax(dim=1)
        correct_and_total[0] += (predictions == labels.to(device)).sum()
        correct_and_total[1] += len(labels)
    # TODO 4: the counts of all processes
    # Look up: torch.distributed.all_reduce
    correct, total = correct_and_total.tolist()
    return correct / total


def save_snapshot(path, model, optimizer, epoch):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    snapshot = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    # os.replace is atomic: whoever reads finds the old snapshot or the new one, never half of one.
    torch.save(snapshot, path + ".tmp")
    os.replace(path + ".tmp", path)


def load_snapshot(path, model, optimizer, device):
    """Fill model and optimizer from the snapshot, if there is one, and return the epoch to start with."""
    if not os.path.exists(path):
        return 0
    snapshot = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["epoch"] + 1


if __name__ == "__main__":
    main()
