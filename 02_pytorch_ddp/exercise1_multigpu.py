"""Exercise 1: train on all devices of one machine instead of one, with mp.spawn and DistributedDataParallel.
This program is single_gpu.py with six TODOs, and it works as delivered and after each TODO. Its functions already take the
rank of the process and the world size, which is the number of processes: as delivered, it is rank 0 of 1.
Do the TODOs in order, and the steps of each TODO in the order of their letters. Run and check the program after each TODO.

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
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset  # TODO 5, step c: drop RandomSampler
from torchvision import transforms
from tqdm import tqdm

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int
from workshop.training.logs import EpochLog
from workshop.training.models import SmallCNN

SEED = 42


def main():
    args = parse_arguments()
    # TODO 1: start several processes and let them join one process group. Part 3 of the notebook has a complete example with
    # mp.spawn; copy its lines and adapt them.
    # Step a: start args.nproc processes. Each of them calls a new function, worker(), which contains the two lines below,
    # with its own rank and world size.
    # Look up: torch.multiprocessing.spawn
    # Step b: before it trains, worker() joins the process group. The processes find each other through a store: main()
    # opens it on a free port, and each process connects to this port. The backend depends on the device.
    # Look up: torch.distributed.TCPStore, init_process_group, get_default_backend_for_device
    # Step c: after the training, worker() leaves the group, also if an error has occurred, so that no connection remains.
    # Look up: destroy_process_group
    # Step d: each process uses one thread per core, so several processes compete for the cores. Before you start them,
    # set OMP_NUM_THREADS to 1, unless the user has set it.
    # Look up: os.environ.setdefault
    device = choose_device(0)
    train(0, 1, device, args)


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples per batch and process")
    parser.add_argument("--save-every", type=positive_int, default=1, help="epochs between two checkpoints")
    parser.add_argument("--checkpoint", default="runs/multigpu.pt", help="file to save to and to resume from")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist after ./workshop.sh fetch mnist")
    parser.add_argument("--nproc", type=positive_int, default=torch.accelerator.device_count() or 2, help="processes")
    args = parser.parse_args()
    check_arguments(parser, args, SmallCNN(), world_size=args.nproc)
    return args


def choose_device(local_rank):
    # In a CUDA build, current_accelerator() returns "cuda" even without a GPU, so ask is_available() first.
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    # TODO 2: let each process use its own device: choose the one whose index is its local rank, which is the index of the
    # process on this machine. The line below then returns this device.
    # Look up: torch.accelerator.set_device_index
    return torch.accelerator.current_accelerator()


def train(rank, world_size, device, args):
    torch.manual_seed(SEED)  # the same initial parameters in every run
    model = SmallCNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first_epoch = load_checkpoint(args.checkpoint, model, optimizer)
    # TODO 3, step a: tell the log the number of processes. Let only rank 0 print the line below, so that it appears once.
    log = EpochLog(args.checkpoint, args.epochs, device, processes=1)
    print(f"training on {device} from epoch {first_epoch + 1}")

    # TODO 4, step a: when the processes train on different samples (TODO 5), each of them computes different gradients.
    # Wrap the model, so that backward() averages the gradients over all processes. Keep the plain model too.
    # Look up: torch.nn.parallel.DistributedDataParallel
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    # TODO 5, step a: let each process train on different samples. With the seed SEED on all ranks, two processes with a
    # batch size of 64 together use the same global batches as single_gpu.py does with a batch size of 128. All ranks need
    # the same number of samples.
    # Look up: torch.utils.data.DistributedSampler, its arguments seed and drop_last
    sampler = RandomSampler(train_set, generator=torch.Generator())
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    # TODO 6, step a: let each process evaluate a different part of the test set. Each sample must count exactly once, so
    # do not use DistributedSampler, which repeats some samples to make all parts equally large.
    # Look up: torch.utils.data.Subset
    test_loader = DataLoader(test_set, args.batch_size)

    for epoch in range(first_epoch, args.epochs):
        # Each epoch sets its own seed, so a resumed run does not need the random state of the interrupted one.
        # TODO 5, step b: use a different seed on each rank, so that random numbers differ (for example those of data
        # augmentation). Tell the sampler the number of the epoch, so that each epoch has a new order.
        # Look up: DistributedSampler.set_epoch
        torch.manual_seed(SEED + 1000 * epoch)
        sampler.generator.manual_seed(SEED + epoch)
        start = time.perf_counter()
        # TODO 4, step b: train the wrapped model. Evaluate and save the plain model, as before.
        losses = train_one_epoch(model, train_loader, optimizer, device)
        seconds = time.perf_counter() - start
        # TODO 6, step b: report the samples per second of all processes together.
        samples_per_second = len(losses) * args.batch_size / seconds

        accuracy = evaluate(model, test_loader, device)
        # TODO 3, step b: let only rank 0 write the log, because two writers can damage a file. The program already lets
        # only rank 0 save the checkpoint.
        log.write(epoch, losses, accuracy, samples_per_second)
        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs):
            save_checkpoint(args.checkpoint, model, optimizer, epoch)


def train_one_epoch(model, loader, optimizer, device):
    """Take one optimizer step per batch and return the loss of each step."""
    model.train()
    losses = torch.zeros(len(loader), device=device)
    # disable=None shows the progress bar on a terminal, but not in a log file.
    # TODO 3, step c: show only the progress bar of rank 0. Pass True on the other ranks; keep None on rank 0.
    # Look up: torch.distributed.get_rank
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=None)):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    # TODO 6, step c: average the losses over all processes, so that each is the mean over a global batch.
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
    # TODO 6, step d: sum the two counts over all processes, so that the accuracy covers the whole test set.
    # Look up: torch.distributed.all_reduce
    correct, total = correct_and_total.tolist()
    return correct / total


def save_checkpoint(path, model, optimizer, epoch):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    # os.replace is atomic: a reader finds the old checkpoint or the new one, never an incomplete file.
    torch.save(checkpoint, path + ".tmp")
    os.replace(path + ".tmp", path)


def load_checkpoint(path, model, optimizer):
    """Load the model and the optimizer from the checkpoint if it exists, and return the first epoch to train."""
    if not os.path.exists(path):
        return 0
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # step counts on a GPU would slow AdamW down
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"] + 1


if __name__ == "__main__":
    main()
