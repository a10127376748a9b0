"""Exercise 2: the training of stage 02 with Accelerate, which finds the rank and the device by itself.
This program is the solution of stage 02 with four TODOs, and it works as delivered and after each TODO.
Do the TODOs in order, and the steps of each TODO in the order of their letters. Run and check it after each TODO.

Run it:    05_deepspeed/exercise2_run_accelerate.sh --epochs 2
Check it:  ./workshop.sh check 05_deepspeed/exercise2_accelerate.py
"""

import os
import shutil
import time

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP  # TODO 1, step i: delete this import.
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler  # TODO 2, step d: delete this import.
from torchvision import transforms
from torch.utils.data import Subset  # TODO 3, step e: delete this import.
from tqdm import tqdm

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int
from workshop.training.logs import EpochLog
from workshop.training.models import SmallCNN

SEED = 42
# TODO 2, step a: make the order of the samples depend only on SEED and the epoch, so that all ranks use the same order.
# Look up: DataLoaderConfiguration, its arguments use_seedable_sampler and data_seed
ORDER = None


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    # TODO 1, step a: create an Accelerator instead. It finds rank and device, and creates the process group. Pass ORDER as its
    # dataloader_config. Its argument cpu must be True on a machine without a GPU.
    # Look up: Accelerator; torch.accelerator.is_available
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # torchrun sets these variables
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(rank, world_size, device, args)  # TODO 1, step b: pass the Accelerator and args.
    finally:
        dist.destroy_process_group()  # TODO 1, step c: call end_training() of the Accelerator.


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples per batch and process")
    parser.add_argument("--save-every", type=positive_int, default=1, help="epochs between two checkpoints")
    parser.add_argument("--folder", default="runs/accelerate", help="folder to save to and to resume from")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist after ./workshop.sh fetch mnist")
    args = parser.parse_args()
    check_arguments(parser, args, world_size=int(os.environ.get("WORLD_SIZE", 0)))
    return args


def choose_device(local_rank):  # TODO 1, step h: delete this function.
    # In a CUDA build, current_accelerator() returns "cuda" even without a GPU, so ask is_available() first.
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())  # 0 if only one GPU is visible
    return torch.accelerator.current_accelerator()


def train(rank, world_size, device, args):
    # TODO 1, step d: take these three values from the Accelerator. Look up: process_index, num_processes, device
    torch.manual_seed(SEED)  # the same initial parameters in every run
    model = SmallCNN().to(device)  # TODO 1, step e: remove .to(device). prepare() moves the model.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # TODO 1, step f: let the Accelerator prepare model and optimizer. It moves the model to the device, and puts DDP around it.
    # Look up: prepare of the Accelerator
    model = DDP(model)  # the same parameters, but backward() averages the gradients over all processes

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    # TODO 2, step b: let the Accelerator prepare a loader that shuffles, with the per-rank batch size and without a sampler of
    # your own. It distributes whole batches over the ranks. Drop the last, smaller batch, as this program does now.
    # The same permutation as in single_gpu.py, dealt to the ranks in turn: together they use the same global batches.
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

    # TODO 3, step a: prepare a loader of the whole test set too. It repeats samples, so that all ranks get the same number.
    # Distribute the test samples by hand: DistributedSampler repeats some of them, and they would count twice.
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size)

    log = EpochLog(f"{args.folder}/log", args.epochs, device, processes=world_size)
    # TODO 4, step d: pass only the Accelerator and the folder.
    first_epoch = load_checkpoint(model, optimizer, args.folder)
    if rank == 0:
        gpus = torch.accelerator.device_count()
        print(f"training on {device} from epoch {first_epoch + 1}: {world_size} processes, {gpus} GPUs here")
    for epoch in range(first_epoch, args.epochs):
        # Each epoch sets its own seed, so a resumed run does not need the random state of the interrupted one.
        torch.manual_seed(SEED + 1000 * epoch + rank)
        sampler.set_epoch(epoch)  # TODO 2, step c: call set_epoch() of the prepared loader.
        start = time.perf_counter()
        losses = train_one_epoch(model, train_loader, optimizer, device)  # TODO 1, step g: add the Accelerator.
        seconds = time.perf_counter() - start
        samples_per_second = len(losses) * args.batch_size * world_size / seconds

        accuracy = evaluate(model, test_loader, device)  # TODO 3, step b: add the Accelerator.
        if rank == 0:
            log.write(epoch, losses, accuracy, samples_per_second)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
            # TODO 4, step b: pass the Accelerator, the folder and the epoch.
            save_checkpoint(model, optimizer, args.folder, epoch)


def train_one_epoch(model, loader, optimizer, device):  # TODO 1, step g: add the Accelerator.
    """Take one optimizer step per batch and return the loss of each step."""
    model.train()
    losses = torch.zeros(len(loader), device=device)
    # disable=None shows the progress bar on a terminal, but not in a log file.
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=dist.get_rank() > 0 or None)):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()  # TODO 1, step g: call backward() of the Accelerator with the loss.
        optimizer.step()
        losses[step] = loss.item()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


@torch.inference_mode()
def evaluate(model, loader, device):  # TODO 3, step b: add the Accelerator.
    """Return the accuracy over the whole test set, between 0 and 1."""
    model.eval()
    right = []
    for images, labels in loader:
        hits = model(images.to(device)).argmax(dim=1) == labels.to(device)
        right.append(hits)  # TODO 3, step c: append the hits of all ranks, without those of the repeated samples.
        # Look up: gather_for_metrics of the Accelerator
    # TODO 3, step d: each rank now has all hits. Return their mean, without an all_reduce.
    correct_and_total = torch.tensor([torch.cat(right).sum(), len(torch.cat(right))], device=device)
    dist.all_reduce(correct_and_total)
    correct, total = correct_and_total.tolist()
    return correct / total


def save_checkpoint(model, optimizer, folder, epoch):
    # TODO 4, step a: let the Accelerator save everything that it has prepared, to a folder with a temporary name. If the run is
    # killed meanwhile, no run resumes from an incomplete checkpoint. When all ranks have saved, rank 0 renames the folder, for
    # example to epoch-3, and deletes the previous one. Look up: save_state, wait_for_everyone, is_main_process; os.rename
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        checkpoint = {
            "model": getattr(model, "module", model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
        }
        torch.save(checkpoint, f"{folder}/checkpoint.pt.tmp")
        os.replace(f"{folder}/checkpoint.pt.tmp", f"{folder}/checkpoint.pt")


def load_checkpoint(model, optimizer, folder):  # TODO 4, step d: take the Accelerator and the folder.
    """Load the model and the optimizer from the checkpoint if it exists, and return the first epoch to train."""
    # TODO 4, step c: find the folder with the largest number. If there is none, begin with epoch 0. Otherwise let the Accelerator
    # load everything that it has prepared from this folder. Look up: load_state
    if not os.path.exists(f"{folder}/checkpoint.pt"):
        return 0
    # TODO 4, step c: load it here, and return the number of the next epoch.
    checkpoint = torch.load(f"{folder}/checkpoint.pt", map_location="cpu", weights_only=True)
    getattr(model, "module", model).load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"] + 1


if __name__ == "__main__":
    main()
