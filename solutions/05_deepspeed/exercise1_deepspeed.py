"""Train a small CNN on handwritten digits with DeepSpeed, whose configuration decides what ZeRO shards over the processes.
It saves a checkpoint after each epoch. If you start it again, it resumes, as if it had never been stopped.

One process:  torchrun --standalone --nproc-per-node=1 solutions/05_deepspeed/exercise1_deepspeed.py
N processes:  torchrun --standalone --nproc-per-node=2 solutions/05_deepspeed/exercise1_deepspeed.py --config zero3.json
Slurm:        srun --ntasks=4 --gpus-per-task=1 --cpus-per-task=8 solutions/05_deepspeed/exercise1_run_deepspeed.sh
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
    # The engine averages the gradients, takes the optimizer steps, and saves the checkpoints.
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.config)
    log = EpochLog(f"{args.folder}/log", args.epochs, device, processes=world_size)
    first_epoch = load_checkpoint(engine, args.folder)
    if rank == 0:
        gpus = torch.accelerator.device_count()
        print(f"training on {device} from epoch {first_epoch + 1}: {world_size} processes, {gpus} GPUs here")

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    # The same permutation as in single_gpu.py, dealt to the ranks in turn: together they use the same global batches.
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    # With ZeRO-3, each forward pass gathers parameters, so all ranks must evaluate the same number of batches. A rank with one
    # sample fewer also evaluates sample 0, which evaluate() does not count there.
    own = range(rank, len(test_set), world_size)
    as_many = [*own, 0][: -(-len(test_set) // world_size)]
    test_loader = DataLoader(Subset(test_set, as_many), args.batch_size)

    for epoch in range(first_epoch, args.epochs):
        # Each epoch sets its own seed, so a resumed run does not need the random state of the interrupted one.
        torch.manual_seed(SEED + 1000 * epoch + rank)
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        losses = train_one_epoch(engine, train_loader, device)
        seconds = time.perf_counter() - start
        samples_per_second = len(losses) * args.batch_size * world_size / seconds

        accuracy = evaluate(engine, test_loader, len(own), device)
        if rank == 0:
            log.write(epoch, losses, accuracy, samples_per_second)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
            save_checkpoint(engine, args.folder, epoch)

    if args.export and rank == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(args.folder)  # combines the shards of all processes
        torch.save(weights, args.export)


def train_one_epoch(engine, loader, device):
    """Take one optimizer step per batch and return the loss of each step."""
    engine.train()
    losses = torch.zeros(len(loader), device=device)
    # disable=None shows the progress bar on a terminal, but not in a log file.
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=dist.get_rank() > 0 or None)):
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(engine(images), labels)
        engine.backward(loss)  # averages the gradients over all processes; from ZeRO-2 on, each keeps only its shard
        engine.step()  # updates this process's shard, gathers the parameters (not with ZeRO-3), zeroes the gradients
        losses[step] = loss.item()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


@torch.no_grad()
def evaluate(engine, loader, counted, device):
    """Return the accuracy over the test set, between 0 and 1, from the first ``counted`` samples of each process."""
    engine.eval()
    right = torch.cat([engine(images.to(device)).argmax(dim=1) == labels.to(device) for images, labels in loader])
    correct_and_total = torch.tensor([right[:counted].sum(), counted], device=device)
    dist.all_reduce(correct_and_total)
    correct, total = correct_and_total.tolist()
    return correct / total


def save_checkpoint(engine, folder, epoch):
    """Save a checkpoint, then delete the previous one. The file "latest" names the checkpoint once it is complete."""
    engine.save_checkpoint(folder, tag=f"epoch-{epoch}", client_state={"epoch": epoch})
    for other in os.listdir(folder) if dist.get_rank() == 0 else []:
        if other.startswith("epoch-") and other != f"epoch-{epoch}":
            shutil.rmtree(os.path.join(folder, other))


def load_checkpoint(engine, folder):
    """Load the engine from the checkpoint if it exists, and return the first epoch to train."""
    if not os.path.exists(os.path.join(folder, "latest")):
        return 0
    _, state = engine.load_checkpoint(folder)
    return state["epoch"] + 1


if __name__ == "__main__":
    main()
