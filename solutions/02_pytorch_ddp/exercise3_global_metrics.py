"""Train a small CNN on handwritten digits with gradient accumulation, and compute its metrics over all processes.
It saves a checkpoint after each epoch. If you start it again, it resumes, as if it had never been stopped.

One process:  torchrun --standalone --nproc-per-node=1 solutions/02_pytorch_ddp/exercise3_global_metrics.py
N processes:  torchrun --standalone --nproc-per-node=2 solutions/02_pytorch_ddp/exercise3_global_metrics.py
Slurm:        srun --ntasks=1 --gpus=4 --cpus-per-task=8 solutions/02_pytorch_ddp/exercise3_run_global_metrics.sh
"""

import os
import time
from contextlib import nullcontext
from itertools import islice

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms
from tqdm import tqdm

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_int
from workshop.training.logs import EpochLog
from workshop.training.models import SmallCNN

SEED = 42
CLASSES = 10


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # torchrun sets these variables
    # Each process uses its own GPU, or the CPU on a machine without one.
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    backend = dist.get_default_backend_for_device(device)  # "nccl" on NVIDIA and AMD GPUs, "gloo" on the CPU
    dist.init_process_group(backend)
    try:
        train(rank, world_size, device, args)
    finally:
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples per batch and process")
    parser.add_argument("--save-every", type=positive_int, default=1, help="epochs between two checkpoints")
    parser.add_argument("--checkpoint", default="runs/global_metrics.pt", help="file to save to and to resume from")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist after ./workshop.sh fetch mnist")
    parser.add_argument("--accumulate", type=positive_int, default=1, help="batches per step")
    args = parser.parse_args()
    check_arguments(parser, args, SmallCNN(), world_size=int(os.environ.get("WORLD_SIZE", 0)))
    return args


def choose_device(local_rank):
    # In a CUDA build, current_accelerator() returns "cuda" even without a GPU, so ask is_available() first.
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())  # 0 if only one GPU is visible
    return torch.accelerator.current_accelerator()


def train(rank, world_size, device, args):
    torch.manual_seed(SEED)  # the same initial parameters in every run
    model = SmallCNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first_epoch = load_checkpoint(args.checkpoint, model, optimizer)
    log = EpochLog(args.checkpoint, args.epochs, device, processes=world_size)
    if rank == 0:
        gpus = torch.accelerator.device_count()
        print(f"training on {device} from epoch {first_epoch + 1}: {world_size} processes, {gpus} GPUs here")

    ddp_model = DDP(model)  # the same parameters, but backward() averages the gradients over all processes
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    # The same permutation as in single_gpu.py, dealt to the ranks in turn: together they use the same global batches.
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    # Distribute the test samples by hand: DistributedSampler repeats some of them, and they would count twice.
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size)

    for epoch in range(first_epoch, args.epochs):
        # Each epoch sets its own seed, so a resumed run does not need the random state of the interrupted one.
        torch.manual_seed(SEED + 1000 * epoch + rank)
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        losses = train_one_epoch(ddp_model, train_loader, optimizer, device, args.accumulate)
        seconds = time.perf_counter() - start
        samples_per_second = len(losses) * args.accumulate * args.batch_size * world_size / seconds

        accuracy, macro_f1 = evaluate(model, test_loader, device)
        if rank == 0:
            log.write(epoch, losses, accuracy, samples_per_second, macro_f1=macro_f1)
        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs):
            save_checkpoint(args.checkpoint, model, optimizer, epoch)


def train_one_epoch(model, loader, optimizer, device, accumulate):
    """Take one optimizer step per `accumulate` batches and return the loss of each step."""
    model.train()
    losses = torch.zeros(len(loader) // accumulate, device=device)
    batches = islice(loader, len(losses) * accumulate)  # drop the last batches if they do not fill a step
    # disable=None shows the progress bar on a terminal, but not in a log file.
    for batch, (images, labels) in enumerate(tqdm(batches, leave=False, disable=dist.get_rank() > 0 or None)):
        images, labels = images.to(device), labels.to(device)
        step, is_last = batch // accumulate, (batch + 1) % accumulate == 0
        # Gradients add up until zero_grad(), so communicate them only in the backward pass of the last batch of a step.
        with nullcontext() if is_last else model.no_sync():
            loss = F.cross_entropy(model(images), labels) / accumulate  # the mean over all batches of the step
            loss.backward()
        losses[step] += loss.item()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


@torch.inference_mode()
def evaluate(model, loader, device):
    """Return the accuracy and the macro F1 score over the whole test set, both between 0 and 1."""
    model.eval()
    confusion = torch.zeros(CLASSES, CLASSES, device=device)  # number of samples per true class and predicted class
    for images, labels in loader:
        predictions = model(images.to(device)).argmax(dim=1)
        confusion += (labels.to(device) * CLASSES + predictions).bincount(minlength=CLASSES**2).view_as(confusion)
    # Sum the counts, then compute the metrics: the mean of the ranks' F1 scores is not the F1 score of all samples.
    dist.all_reduce(confusion)
    correct = confusion.diagonal()
    f1 = 2 * correct / (confusion.sum(dim=0) + confusion.sum(dim=1)).clamp(min=1)  # one F1 score per class
    return (correct.sum() / confusion.sum()).item(), f1.mean().item()


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
