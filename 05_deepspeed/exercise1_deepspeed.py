"""Exercise 1: the training of stage 02 with DeepSpeed. Its configuration decides what ZeRO shards over the ranks.
This program is the solution of stage 02 with four TODOs, and it works as delivered and after each TODO.
Do the TODOs in order, and the steps of each TODO in the order of their letters. Run and check it after each TODO.

Run it:    05_deepspeed/exercise1_run_deepspeed.sh --epochs 2
Check it:  ./workshop.sh check 05_deepspeed/exercise1_deepspeed.py
"""

import os
import shutil
import time

from workshop.training.deepspeed import require_deepspeed
from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports
require_deepspeed()  # ends with one line if DeepSpeed is missing; selects the CPU on a machine without a GPU

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP  # TODO 1, step d: delete this import.
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms
from tqdm import tqdm

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, positive_int
from workshop.training.deepspeed import check_zero
from workshop.training.logs import EpochLog
from workshop.training.models import SmallCNN

SEED = 42
CONFIG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ds_config.json")


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # every launcher sets these
    # Each process uses its own GPU, or the CPU on a machine without one.
    # DeepSpeed takes the index from LOCAL_RANK. If only one GPU is visible, require_deepspeed() sets LOCAL_RANK to 0.
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
    parser.add_argument("--folder", default="runs/deepspeed", help="folder to save to and to resume from")
    parser.add_argument("--export", help="file for the trained parameters, which plain PyTorch can load")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist after ./workshop.sh fetch mnist")
    parser.add_argument("--config", default=CONFIG, help="JSON file with the configuration of DeepSpeed")
    args = parser.parse_args()
    args.config = check_zero(parser, args)  # the content of the file, with this --batch-size
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
    # TODO 1, step a: with ZeRO, no rank has the whole optimizer. Let DeepSpeed create an engine from the model, the optimizer and
    # args.config. It controls the steps and averages the gradients, so it replaces DDP.
    # Look up: deepspeed.initialize
    # (TODO 2 changes ds_config.json, which cannot contain comments. Step a: let ZeRO shard the optimizer state. Step b: one
    # default of DeepSpeed changes the losses. Compare them with those of stage 02, and switch this default off.
    # Look up: "zero_optimization" and "gradient_clipping" on https://www.deepspeed.ai/docs/config-json/)
    engine = DDP(model)  # the same parameters, but backward() averages the gradients over all processes
    log = EpochLog(f"{args.folder}/log", args.epochs, device, processes=world_size)
    first_epoch = load_checkpoint(engine, optimizer, args.folder)  # TODO 3, step d: pass engine and folder.
    if rank == 0:
        gpus = torch.accelerator.device_count()
        print(f"training on {device} from epoch {first_epoch + 1}: {world_size} processes, {gpus} GPUs here")

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    # The same permutation as in single_gpu.py, dealt to the ranks in turn: together they use the same global batches.
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    # Distribute the test samples by hand: DistributedSampler repeats some of them, and they would count twice.
    # TODO 4, step a: with ZeRO-3, each forward pass gathers parameters from all ranks, so all ranks must evaluate the same number
    # of batches. If a rank has one sample fewer than the others, give it an extra sample, which evaluate() must not count.
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size)

    for epoch in range(first_epoch, args.epochs):
        # Each epoch sets its own seed, so a resumed run does not need the random state of the interrupted one.
        torch.manual_seed(SEED + 1000 * epoch + rank)
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        losses = train_one_epoch(engine, train_loader, optimizer, device)  # TODO 1, step c: remove the optimizer.
        seconds = time.perf_counter() - start
        samples_per_second = len(losses) * args.batch_size * world_size / seconds

        accuracy = evaluate(engine, test_loader, device)  # TODO 4, step b: also pass how many samples count.
        if rank == 0:
            log.write(epoch, losses, accuracy, samples_per_second)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
            save_checkpoint(engine, optimizer, args.folder, epoch)  # TODO 3, step b: remove the optimizer.

    # TODO 4, step d: if args.export names a file, combine the shards of the checkpoint and write the parameters to this file, on
    # rank 0. A plain SmallCNN must be able to load them.
    # Look up: get_fp32_state_dict_from_zero_checkpoint, torch.save


def train_one_epoch(engine, loader, optimizer, device):  # TODO 1, step c: remove the optimizer.
    """Take one optimizer step per batch and return the loss of each step."""
    engine.train()
    losses = torch.zeros(len(loader), device=device)
    # disable=None shows the progress bar on a terminal, but not in a log file.
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=dist.get_rank() > 0 or None)):
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(engine(images), labels)
        # TODO 1, step b: the engine does the backward pass and the optimizer step. Its step also sets the gradients to zero.
        # Look up: backward and step of the engine
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


@torch.no_grad()
def evaluate(engine, loader, device):  # TODO 4, step c: add the number of samples that count.
    """Return the accuracy over the whole test set, between 0 and 1."""
    engine.eval()
    right = torch.cat([engine(images.to(device)).argmax(dim=1) == labels.to(device) for images, labels in loader])
    correct_and_total = torch.tensor([right.sum(), len(right)], device=device)  # TODO 4, step c: count only these.
    dist.all_reduce(correct_and_total)
    correct, total = correct_and_total.tolist()
    return correct / total


def save_checkpoint(engine, optimizer, folder, epoch):
    # TODO 3, step a: each rank has moments that no other rank has, so a file of rank 0 is not enough. Let the engine save the
    # shards of all ranks. Name the epoch in the tag, and store it in client_state. Then rank 0 deletes the previous checkpoint.
    # Look up: save_checkpoint of the engine. Which ranks must call it?
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        checkpoint = {"model": engine.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(checkpoint, f"{folder}/checkpoint.pt.tmp")
        os.replace(f"{folder}/checkpoint.pt.tmp", f"{folder}/checkpoint.pt")


def load_checkpoint(engine, optimizer, folder):  # TODO 3, step d: keep engine and folder.
    """Load the engine from the checkpoint if it exists, and return the first epoch to train."""
    # TODO 3, step c: the file "latest" contains the name of the newest checkpoint. If it does not exist, begin with epoch 0.
    # Otherwise let the engine load this checkpoint.
    # Look up: load_checkpoint of the engine, and what it returns
    if not os.path.exists(f"{folder}/checkpoint.pt"):
        return 0
    # TODO 3, step c: load it here. The number of the last completed epoch is in its client_state.
    checkpoint = torch.load(f"{folder}/checkpoint.pt", map_location="cpu", weights_only=True)
    engine.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"] + 1


if __name__ == "__main__":
    main()
