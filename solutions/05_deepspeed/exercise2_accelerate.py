"""Train a small CNN on handwritten digits on any number of devices with Accelerate, which finds rank and device by itself.
It saves a checkpoint after each epoch. If you start it again, it resumes, as if it had never been stopped.

One process:  torchrun --standalone --nproc-per-node=1 solutions/05_deepspeed/exercise2_accelerate.py
N processes:  torchrun --standalone --nproc-per-node=2 solutions/05_deepspeed/exercise2_accelerate.py
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=8 solutions/05_deepspeed/exercise2_run_accelerate.sh
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
from torch.utils.data import DataLoader
from torchvision import transforms
from tqdm import tqdm

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int
from workshop.training.logs import EpochLog
from workshop.training.models import SmallCNN

SEED = 42
# This seed and the number of the epoch determine the order of the samples, for any number of processes.
ORDER = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED)


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    # The Accelerator detects the launcher, creates the process group, and chooses device and backend.
    no_gpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=no_gpu, dataloader_config=ORDER)
    try:
        train(accelerator, args)
    finally:
        accelerator.end_training()


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


def train(accelerator, args):
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    torch.manual_seed(SEED)  # the same initial parameters in every run
    model = SmallCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)  # moves the model to the device, wraps it in DDP

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    # The prepared loader gives the processes whole batches in turn, so together they process the global batches of
    # single_gpu.py.
    train_loader = accelerator.prepare(DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True))

    # Every process gets the same number of test samples, so some samples are repeated.
    test_loader = accelerator.prepare(DataLoader(test_set, args.batch_size))

    log = EpochLog(f"{args.folder}/log", args.epochs, device, processes=world_size)
    first_epoch = load_checkpoint(accelerator, args.folder)
    if rank == 0:
        gpus = torch.accelerator.device_count()
        print(f"training on {device} from epoch {first_epoch + 1}: {world_size} processes, {gpus} GPUs here")
    for epoch in range(first_epoch, args.epochs):
        # Each epoch sets its own seed, so a resumed run does not need the random state of the interrupted one.
        torch.manual_seed(SEED + 1000 * epoch + rank)
        train_loader.set_epoch(epoch)
        start = time.perf_counter()
        losses = train_one_epoch(accelerator, model, train_loader, optimizer, device)
        seconds = time.perf_counter() - start
        samples_per_second = len(losses) * args.batch_size * world_size / seconds

        accuracy = evaluate(accelerator, model, test_loader, device)
        if rank == 0:
            log.write(epoch, losses, accuracy, samples_per_second)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
            save_checkpoint(accelerator, args.folder, epoch)


def train_one_epoch(accelerator, model, loader, optimizer, device):
    """Take one optimizer step per batch and return the loss of each step."""
    model.train()
    losses = torch.zeros(len(loader), device=device)
    # disable=None shows the progress bar on a terminal, but not in a log file.
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=dist.get_rank() > 0 or None)):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)  # would also scale the loss for float16, or divide it for accumulated batches
        optimizer.step()
        losses[step] = loss.item()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


@torch.inference_mode()
def evaluate(accelerator, model, loader, device):
    """Return the accuracy over the whole test set, between 0 and 1."""
    model.eval()
    right = []
    for images, labels in loader:
        hits = model(images.to(device)).argmax(dim=1) == labels.to(device)
        right.append(accelerator.gather_for_metrics(hits))  # of all processes, without the repeated samples
    return torch.cat(right).double().mean().item()


def save_checkpoint(accelerator, folder, epoch):
    """Save a checkpoint, and delete the previous one. Each process writes its random state, and rank 0 writes the rest."""
    accelerator.save_state(f"{folder}/unfinished")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # A rename is atomic: a reader finds a complete checkpoint, or none with this name.
        os.rename(f"{folder}/unfinished", f"{folder}/epoch-{epoch}")
        for other in saved_epochs(folder)[:-1]:
            shutil.rmtree(f"{folder}/epoch-{other}")


def load_checkpoint(accelerator, folder):
    """Load everything that was prepared from the newest checkpoint if it exists, and return the first epoch to train."""
    epochs = saved_epochs(folder)
    if not epochs:
        return 0
    accelerator.load_state(f"{folder}/epoch-{epochs[-1]}")
    return epochs[-1] + 1


def saved_epochs(folder):
    """Return the epochs that have a checkpoint, in ascending order."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name.removeprefix("epoch-")) for name in names if name.startswith("epoch-"))


if __name__ == "__main__":
    main()
