"""Train on one to three nodes that may leave and join while the training runs: torchrun restarts all ranks after each change.

Run it:    slurm-multinode/exercise4_run_elastic.sh, once per node
Check it:  ./workshop.sh check slurm-multinode/exercise4_elastic.py

As delivered, the program needs the same number of ranks from the start to the end. TODO 1 is in exercise4_run_elastic.sh. After
all TODOs, a training that continues with a different number of ranks ends with the same parameters.
"""

import os
import socket

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_float, positive_int
from workshop.training.device import local_device
from workshop.training.models import SmallCNN

SEED = 42
# A node that loses power closes no connection. The other ranks notice it only after this time in a collective.
PATIENCE = timedelta(seconds=60)


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    device = local_device()
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=PATIENCE)
    try:
        train(device, args)
        dist.barrier()  # no rank ends before the last checkpoint is complete
    finally:
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples per step")
    parser.add_argument("--learning-rate", type=positive_float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--save-every", type=positive_int, default=5, help="steps between two checkpoints")
    parser.add_argument("--checkpoint", default="runs/exercise4_elastic.pt", help="file to save to and to resume from")
    args = parser.parse_args()
    check_arguments(parser, args, world_size=min(1, int(os.environ.get("WORLD_SIZE", 0))))
    if args.batch_size < int(os.environ["WORLD_SIZE"]):
        parser.error(f"--batch-size {args.batch_size} is smaller than the number of ranks, {os.environ['WORLD_SIZE']}")
    return args


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)  # the same initial parameters in every run
    model = SmallCNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    checkpoint = load_checkpoint(args.checkpoint, model, optimizer)
    first_epoch = checkpoint["epoch"]
    # TODO 4, step a: the checkpoint also says how many steps of this epoch are done. Continue after them, or the training repeats
    #         the first samples of the epoch. Steps b and c are below.
    first_step = 0
    ddp_model = DDP(model)
    train_set, _ = load_dataset("digits")

    for epoch in range(first_epoch, args.epochs):
        batches = global_batches(len(train_set), epoch, args.batch_size)
        # TODO 4, step b: deal to the ranks only the global batches of the epoch that are left.
        parts = [batch[rank::world_size].tolist() for batch in batches]
        for step, (images, labels) in enumerate(DataLoader(train_set, batch_sampler=parts), first_step):
            optimizer.zero_grad()
            # TODO 2, step b: ranks can have different numbers of samples, and DDP averages over the ranks. Weight the loss so
            #         that the gradient is the mean over all samples of the global batch.
            #         Look up: F.cross_entropy: reduction; DistributedDataParallel: how it averages
            loss = F.cross_entropy(ddp_model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            if (step + 1) % args.save_every == 0 or step + 1 == len(batches):
                save_checkpoint(args.checkpoint, model, optimizer, epoch, step + 1)
        # TODO 4, step c: the steps that are done belong to the epoch of the checkpoint only. The next epochs are complete.
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: world size {world_size}", flush=True)


def global_batches(samples, epoch, batch_size):
    """Return the samples of each step of an epoch, of all ranks together. The last, incomplete batch is left out."""
    # The order does not depend on the number of ranks.
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(SEED + epoch))
    # TODO 2, step a: as delivered, --batch-size counts the samples of one rank, so a global batch grows with the number of ranks.
    #         The learning rate then no longer fits. Let --batch-size count the samples of all ranks together. Step b is above.
    batch_size = batch_size * dist.get_world_size()
    return order.split(batch_size)[: samples // batch_size]


def save_checkpoint(path, model, optimizer, epoch, step):
    """Save the training after ``step`` steps of an epoch."""
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    # TODO 3, step a: each rank saves a file of its own. With more ranks, the new ones have no file. All ranks have the same model
    #         and the same optimizer, so let one of them save one file for all. Step b is below.
    path = f"{path}-rank{dist.get_rank()}"
    temporary = f"{path}.{socket.gethostname()}-{os.getpid()}.tmp"  # of this process, so that no other one writes to it
    torch.save(checkpoint, temporary)
    os.replace(temporary, path)  # a reader finds the old checkpoint or the new one, never an incomplete file


def load_checkpoint(path, model, optimizer):
    """Load the last checkpoint into the model and the optimizer if it exists, and return all of it."""
    # TODO 3, step b: load this one file on all ranks.
    first_path, path = f"{path}-rank0", f"{path}-rank{dist.get_rank()}"
    if not os.path.exists(first_path):
        return {"epoch": 0, "step": 0}
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint


if __name__ == "__main__":
    main()
