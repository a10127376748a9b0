"""Train while nodes leave and join. After each change torchrun restarts all ranks, and they resume with their new number.

One node:       torchrun --standalone --nproc-per-node=2 slurm-multinode/surviving/elastic.py
Several nodes:  sbatch elastic.sh, and sbatch --nodes=1 elastic.sh JOB for each node that joins (see the comments there)

Four properties make the training independent of the number of ranks:
1. The order of the samples depends only on the seed and the epoch.
2. A step takes the next --batch-size samples of this order. The ranks share them, so the learning rate stays as it is.
3. The gradient is the mean over these samples, also if the ranks have different numbers of them.
4. The checkpoint contains nothing that belongs to one rank: the model, the optimizer, and the position in the epoch.
"""

import os
import socket
from contextlib import nullcontext
from datetime import timedelta

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_float, positive_int
from workshop.training.device import local_device
from workshop.training.logs import SampleLog
from workshop.training.models import SmallCNN

SEED = 42
# A node that loses power closes no connection. The other ranks notice it only after this time in a collective.
PATIENCE = timedelta(seconds=60)


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    torch.set_default_dtype(getattr(torch, args.dtype))
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
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples per step, of all ranks together")
    parser.add_argument(
        "--micro-batch", type=positive_int, default=64, help="samples per forward pass: limits the memory"
    )
    parser.add_argument("--learning-rate", type=positive_float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--save-every", type=positive_int, default=5, help="steps between two checkpoints")
    parser.add_argument("--checkpoint", default="runs/elastic.pt", help="file to save to and to resume from")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="type of the parameters")
    parser.add_argument("--record", help="folder for a log of the samples of each step and rank")
    args = parser.parse_args()
    # --batch-size does not grow with the number of ranks, so it is checked as that of one rank.
    check_arguments(parser, args, world_size=min(1, int(os.environ.get("WORLD_SIZE", 0))))
    return args


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = SmallCNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    first_epoch, first_step = load_checkpoint(args.checkpoint, model, optimizer, device)
    if rank == 0:
        print(f"world size {world_size}: start at epoch {first_epoch + 1}, step {first_step + 1}", flush=True)
    ddp_model = DDP(model)
    train_set, test_set = load_dataset("digits")
    # The digits are small, so they are two tensors here. A DataLoader with a batch_sampler can yield the same parts.
    images, labels = next(iter(DataLoader(train_set, batch_size=len(train_set))))
    log = SampleLog(args.record, first_epoch, first_step, device)

    for epoch in range(first_epoch, args.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.split(args.batch_size)  # the last one may be smaller
        for step in range(first_step, len(batches)):
            batch = batches[step]
            part = batch[rank::world_size]  # some ranks may have one sample more than others
            log.write(epoch, step, samples=part.tolist(), rate=optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            loss = 0.0
            micro_batches = part.split(args.micro_batch)
            for number, micro_batch in enumerate(micro_batches, 1):
                # Only the last backward pass of the step communicates.
                with nullcontext() if number == len(micro_batches) else ddp_model.no_sync():
                    outputs, targets = ddp_model(images[micro_batch].to(device)), labels[micro_batch].to(device)
                    share = F.cross_entropy(outputs, targets, reduction="sum") / len(batch)
                    # DDP divides the sum over the ranks by their number, but we want the mean over the global batch.
                    (share * world_size).backward()
                loss += share.item()
            optimizer.step()
            log.write(epoch, step, loss=loss)
            if rank == 0 and ((step + 1) % args.save_every == 0 or step + 1 == len(batches)):
                save_checkpoint(args.checkpoint, model, optimizer, epoch, step + 1)
        first_step = 0
        accuracy = evaluate(model, test_set, device)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: accuracy {accuracy:.3f}, world size {world_size}", flush=True)


@torch.inference_mode()
def evaluate(model, test_set, device):
    """Return the accuracy over the whole test set, between 0 and 1."""
    images, labels = next(iter(DataLoader(test_set, batch_size=len(test_set))))
    part = slice(dist.get_rank(), None, dist.get_world_size())
    correct = (model(images[part].to(device)).argmax(dim=1) == labels[part].to(device)).sum()
    dist.all_reduce(correct)
    return correct.item() / len(labels)


def save_checkpoint(path, model, optimizer, epoch, step):
    """Save the training after ``step`` steps of an epoch, where any number of ranks can resume."""
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    # A node that is cut off may still be saving while the others have resumed, so each process has its own temporary file.
    temporary = f"{path}.{socket.gethostname()}-{os.getpid()}.tmp"
    torch.save(checkpoint, temporary)
    os.replace(temporary, path)  # a reader finds the old checkpoint or the new one, never an incomplete file


def load_checkpoint(path, model, optimizer, device):
    """Load the checkpoint if it exists, and return the epoch and the step of the epoch at which the training continues."""
    position = torch.zeros(2, dtype=torch.int64)
    if os.path.exists(path):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        position = torch.tensor([checkpoint["epoch"], checkpoint["step"]])
    positions = [torch.zeros_like(position, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(positions, position.to(device))
    if any(not torch.equal(other.cpu(), position) for other in positions):
        raise RuntimeError(f"the ranks have read different checkpoints: {[each.tolist() for each in positions]}")
    return position.tolist()


if __name__ == "__main__":
    main()
