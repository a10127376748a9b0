"""Train a small CNN on handwritten digits on any number of devices with DeepSpeed, whose configuration says what ZeRO spreads.
It saves a checkpoint after each epoch, each process its part, and, started again, carries on from it as if it had never stopped.

One process:  torchrun --standalone --nproc-per-node=1 solutions/05_deepspeed/exercise1_deepspeed.py
N processes:  torchrun --standalone --nproc-per-node=2 solutions/05_deepspeed/exercise1_deepspeed.py --config zero3.json
Slurm:        srun --ntasks=4 --gpus-per-task=1 --cpus-per-task=8 solutions/05_deepspeed/exercise1_run_deepspeed.sh
"""

import os
import shutil
import time

from workshop.training.deepspeed import require_deepspeed
from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # kill -9 on torchrun would leave this process training, and saving; before the slow imports
require_deepspeed()  # one line where it is missing; and it is to take the CPU where there are fewer GPUs than processes

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
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # any launcher sets these
    # Each process drives a device of its own. DeepSpeed's own launcher has another name for how many there are here.
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["LOCAL_SIZE"])
    device = choose_device(int(os.environ["LOCAL_RANK"]), local_world_size)
    backend = dist.get_default_backend_for_device(device)  # "nccl" on NVIDIA and AMD GPUs, "gloo" on the CPU
    dist.init_process_group(backend)
    try:
        train(rank, world_size, device, args)
    finally:
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples a step, on each process")
    parser.add_argument("--save-every", type=positive_int, default=1, help="epochs from one checkpoint to the next")
    parser.add_argument("--folder", default="runs/deepspeed", help="folder to save to and to carry on from")
    parser.add_argument("--export", help="file for the trained weights, as plain PyTorch loads them")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist once it has been fetched")
    parser.add_argument("--config", default=CONFIG, help="DeepSpeed's configuration")
    args = parser.parse_args()
    args.config = check_zero(parser, args)  # what the file says, with this --batch-size
    return args


def choose_device(local_rank, local_world_size):
    # Without is_available() the CUDA build names "cuda" on a machine that has no GPU.
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local_world_size:
        torch.accelerator.set_device_index(local_rank)
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def train(rank, world_size, device, args):
    torch.manual_seed(SEED)  # the same first weights in every run
    model = SmallCNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The engine takes over the averaging of the gradients, the steps of the optimizer, and the checkpoints.
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.config)
    log = EpochLog(f"{args.folder}/log", args.epochs, device, processes=world_size)
    first_epoch = load_checkpoint(engine, args.folder)
    if rank == 0:
        gpus = torch.accelerator.device_count()
        print(f"training on {device} from epoch {first_epoch + 1}: {world_size} processes, {gpus} GPUs here")

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    # The order of single_gpu.py, dealt out like cards: together the processes see the same global batches.
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    # Dealt out too, but by hand. With ZeRO-3 each forward gathers the weights, so all processes need as many batches: whoever has
    # a sample less takes the first once more, and evaluate() does not count it.
    own = range(rank, len(test_set), world_size)
    as_many = [*own, 0][: -(-len(test_set) // world_size)]
    test_loader = DataLoader(Subset(test_set, as_many), args.batch_size)

    for epoch in range(first_epoch, args.epochs):
        # Each epoch is seeded anew, so a resumed run needs no random state from the checkpoint.
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
        weights = get_fp32_state_dict_from_zero_checkpoint(args.folder)  # puts the parts of all processes together
        torch.save(weights, args.export)


def train_one_epoch(engine, loader, device):
    """Take a step with each batch and return the losses of the steps."""
    engine.train()
    losses = torch.zeros(len(loader), device=device)
    # disable=None: a progress bar on a terminal, none in a log file
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=dist.get_rank() > 0 or None)):
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(engine(images), labels)
        engine.backward(loss)  # averages the gradients over all processes; from ZeRO-2 on each keeps its part of them
        engine.step()  # of its part of the weights; then all get all of them again, and the gradients are zero
        losses[step] = loss.item()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


@torch.no_grad()
def evaluate(engine, loader, counted, device):
    """Return the accuracy over the whole test set, between 0 and 1; of this process's samples the first ``counted`` count."""
    engine.eval()
    right = torch.cat([engine(images.to(device)).argmax(dim=1) == labels.to(device) for images, labels in loader])
    correct_and_total = torch.tensor([right[:counted].sum(), counted], device=device)
    dist.all_reduce(correct_and_total)
    correct, total = correct_and_total.tolist()
    return correct / total


def save_checkpoint(engine, folder, epoch):
    """Write a checkpoint, each process its part; the file "latest" names it once it is whole. Then delete the one before."""
    engine.save_checkpoint(folder, tag=f"epoch-{epoch}", client_state={"epoch": epoch})
    for other in os.listdir(folder) if dist.get_rank() == 0 else []:
        if other.startswith("epoch-") and other != f"epoch-{epoch}":
            shutil.rmtree(os.path.join(folder, other))


def load_checkpoint(engine, folder):
    """Fill the engine from the checkpoint, if there is one, and return the epoch to start with."""
    if not os.path.exists(os.path.join(folder, "latest")):
        return 0
    _, state = engine.load_checkpoint(folder)
    return state["epoch"] + 1


if __name__ == "__main__":
    main()
