"""Exercise 2: the training of stage 02 with Accelerate, which finds devices and processes by itself.
It is stage 02's solution, and works. Do the TODOs in order, and run and check it after each.

Run it:    05_deepspeed/exercise2_run_accelerate.sh --epochs 2
Check it:  ./workshop.sh check 05_deepspeed/exercise2_accelerate.py
"""

import os
import shutil
import time

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # kill -9 on torchrun would leave this process training, and saving; before the slow imports

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP  # TODO 1: goes
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler  # TODO 2: goes
from torchvision import transforms
from torch.utils.data import Subset  # TODO 3: goes
from tqdm import tqdm

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int
from workshop.training.logs import EpochLog
from workshop.training.models import SmallCNN

SEED = 42
# TODO 2: the order of the samples is to follow from SEED and the number of the epoch
# Look up: DataLoaderConfiguration, use_seedable_sampler, data_seed
ORDER = None


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    # TODO 1: an Accelerator, with the dataloader_config ORDER, finds all of this out by itself. cpu=True where this machine has
    # fewer GPUs than processes. train() gets it instead of what it knows, and in the end it has an end_training().
    # Look up: Accelerator
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # torchrun sets all of these
    device = choose_device(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(rank, world_size, device, args)  # TODO 1
    finally:
        dist.destroy_process_group()  # TODO 1


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples a step, on each process")
    parser.add_argument("--save-every", type=positive_int, default=1, help="epochs from one checkpoint to the next")
    parser.add_argument("--folder", default="runs/accelerate", help="folder to save to and to carry on from")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist once it has been fetched")
    args = parser.parse_args()
    check_arguments(parser, args, world_size=int(os.environ.get("WORLD_SIZE", 0)))
    return args


def choose_device(local_rank, local_world_size):  # TODO 1: goes, with all of its lines
    # Without is_available() the CUDA build names "cuda" on a machine that has no GPU.
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local_world_size:
        torch.accelerator.set_device_index(local_rank)
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def train(rank, world_size, device, args):
    # TODO 1: rank, world_size and device are the Accelerator's process_index, num_processes and device
    torch.manual_seed(SEED)  # the same first weights in every run
    model = SmallCNN().to(device)  # TODO 1: the Accelerator does that
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # TODO 1: the Accelerator prepares model and optimizer
    # Look up: prepare
    model = DDP(model)  # the same weights, but its backward() averages the gradients over all processes

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    # TODO 2: the Accelerator prepares a plain loader that shuffles, with the batch size of a process, and deals out whole batches
    # The order of single_gpu.py, dealt out like cards: together the processes see the same global batches.
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

    # TODO 3: it prepares this one as well; every process then gets as many samples, and so some come twice
    # Dealt out too, but by hand: DistributedSampler would count some samples twice to give each rank as many.
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size)

    log = EpochLog(f"{args.folder}/log", args.epochs, device, processes=world_size)
    # TODO 4: the Accelerator has all that it has prepared
    first_epoch = load_checkpoint(model, optimizer, args.folder, device)
    if rank == 0:
        gpus = torch.accelerator.device_count()
        print(f"training on {device} from epoch {first_epoch + 1}: {world_size} processes, {gpus} GPUs here")
    for epoch in range(first_epoch, args.epochs):
        # Each epoch is seeded anew, so a resumed run needs no random state from the checkpoint.
        torch.manual_seed(SEED + 1000 * epoch + rank)
        sampler.set_epoch(epoch)  # TODO 2: of the prepared loader
        start = time.perf_counter()
        losses = train_one_epoch(model, train_loader, optimizer, device)  # TODO 1: needs the Accelerator
        seconds = time.perf_counter() - start
        samples_per_second = len(losses) * args.batch_size * world_size / seconds

        accuracy = evaluate(model, test_loader, device)  # TODO 3: needs the Accelerator
        if rank == 0:
            log.write(epoch, losses, accuracy, samples_per_second)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
            save_checkpoint(model, optimizer, args.folder, epoch)  # TODO 4: as above


def train_one_epoch(model, loader, optimizer, device):  # TODO 1
    """Take a step with each batch and return the losses of the steps."""
    model.train()
    losses = torch.zeros(len(loader), device=device)
    # disable=None: a progress bar on a terminal, none in a log file
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=dist.get_rank() > 0 or None)):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()  # TODO 1: is the Accelerator's
        optimizer.step()
        losses[step] = loss.item()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


@torch.inference_mode()
def evaluate(model, loader, device):  # TODO 3
    """Return the accuracy over the whole test set, between 0 and 1."""
    model.eval()
    right = []
    for images, labels in loader:
        hits = model(images.to(device)).argmax(dim=1) == labels.to(device)
        right.append(hits)  # TODO 3: those of all processes, without the samples that came twice
        # Look up: gather_for_metrics
    # TODO 3: which is then all there is to it
    correct_and_total = torch.tensor([torch.cat(right).sum(), len(torch.cat(right))], device=device)
    dist.all_reduce(correct_and_total)
    correct, total = correct_and_total.tolist()
    return correct / total


def save_checkpoint(model, optimizer, folder, epoch):
    # TODO 4: let the Accelerator save all that it has prepared, to a folder that has its name once it is whole: epoch-3, say.
    # Delete the one before it.
    # Look up: save_state. Who has to call it?
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        snapshot = {
            "model": getattr(model, "module", model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
        }
        torch.save(snapshot, f"{folder}/snapshot.pt.tmp")
        os.replace(f"{folder}/snapshot.pt.tmp", f"{folder}/snapshot.pt")


def load_checkpoint(model, optimizer, folder, device):  # TODO 4
    """Fill model and optimizer from the checkpoint, if there is one, and return the epoch to start with."""
    # TODO 4: the way back, from the newest of them
    # Look up: load_state
    if not os.path.exists(f"{folder}/snapshot.pt"):
        return 0
    # TODO 4: of all that was prepared
    snapshot = torch.load(f"{folder}/snapshot.pt", map_location=device, weights_only=True)
    getattr(model, "module", model).load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["epoch"] + 1


if __name__ == "__main__":
    main()
