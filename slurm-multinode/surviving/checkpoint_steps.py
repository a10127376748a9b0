"""Train a small CNN on handwritten digits with a checkpoint every few steps: a kill costs these steps, not a whole epoch.
This is multigpu_torchrun.py with one more idea: a thread writes the checkpoints during the training, and each checkpoint
contains the position in the data.

N processes:  torchrun --standalone --nproc-per-node=2 slurm-multinode/surviving/checkpoint_steps.py --save-every 4
"""

import os
import time

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torchvision import transforms

from complete_checkpoints import Checkpoints  # the file beside this one
from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, check_arguments, positive_float, positive_int
from workshop.training.device import local_device
from workshop.training.models import SmallCNN

SEED = 42


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_arguments()
    device = local_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(dist.get_rank(), dist.get_world_size(), device, args)
    finally:
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive_int, default=5, help="passes over the training set")
    parser.add_argument("--batch-size", type=positive_int, default=64, help="samples per batch and process")
    parser.add_argument("--learning-rate", type=positive_float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--save-every", type=positive_int, default=4, help="steps between two checkpoints")
    parser.add_argument("--folder", default="runs/checkpoint_steps", help="folder to save to and to resume from")
    parser.add_argument("--dataset", default="digits", help="digits, or mnist after ./workshop.sh fetch mnist")
    args = parser.parse_args()
    check_arguments(parser, args, SmallCNN(), world_size=int(os.environ.get("WORLD_SIZE", 0)))
    return args


def train(rank, world_size, device, args):
    torch.manual_seed(SEED)  # the same initial parameters in every run
    model = SmallCNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    loader = StatefulLoader(load_dataset(args.dataset, transform)[0], args.batch_size, rank, world_size)
    state = TrainingState(model, optimizer, loader)
    checkpoints = Checkpoints(args.folder, state)
    checkpoints.load()
    if rank == 0:
        print(f"training on {device} from step {state.step + 1}: {world_size} processes", flush=True)

    ddp_model = DDP(model)  # the same parameters, but backward() averages the gradients over all processes
    losses, start = [], time.perf_counter()
    while loader.epoch < args.epochs:
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp_model(images), labels)
            loss.backward()
            optimizer.step()
            state.step += 1
            losses.append(loss.detach())
            if state.step % args.save_every == 0:
                checkpoints.save()
                loss = torch.stack(losses).mean()
                dist.all_reduce(loss, dist.ReduceOp.AVG)
                speed = len(losses) * args.batch_size * world_size / (time.perf_counter() - start)
                if rank == 0:
                    progress = f"step {state.step} | epoch {loader.epoch + 1}/{args.epochs}"
                    print(f"{progress} | loss {loss:.4f} | {speed:,.0f} samples/s", flush=True)
                losses, start = [], time.perf_counter()
    checkpoints.close()
    if rank == 0:
        print(f"trained {args.epochs} epochs in {state.step} steps", flush=True)


class StatefulLoader:
    """The batches of one rank. Its state is a position in the data: the epoch, and how many samples of it all ranks have used."""

    def __init__(self, dataset, batch_size, rank, world_size):
        self.dataset, self.batch_size, self.rank, self.world_size = dataset, batch_size, rank, world_size
        self.epoch, self.samples = 0, 0

    def __iter__(self):
        """Yield the batches from the position to the end of the epoch. Then the position is the start of the next epoch."""
        # The same permutation as in multigpu_torchrun.py. It depends on the epoch only, so no checkpoint needs to contain it.
        permutation = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(SEED + self.epoch))
        rest, step = permutation[self.samples :].tolist(), self.batch_size * self.world_size
        mine = rest[: len(rest) // step * step][self.rank :: self.world_size]
        batches = iter(DataLoader(self.dataset, self.batch_size, sampler=mine))
        for _ in range(len(rest) // step):
            # A seed for each step: augmentation and dropout draw the same numbers after a restart.
            torch.manual_seed(SEED + self.epoch * 10**9 + self.samples * 1000 + self.rank)
            batch = next(batches)
            self.samples += step
            yield batch
        self.epoch, self.samples = self.epoch + 1, 0


class TrainingState(Stateful):
    """The state of the training. DCP calls state_dict() to save it, and load_state_dict() to restore it."""

    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader, self.step = model, optimizer, loader, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        position = {"step": self.step, "epoch": self.loader.epoch, "samples": self.loader.samples}
        return {"model": model, "optimizer": optimizer, "position": position}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step, self.loader.epoch, self.loader.samples = (
            state["position"][key] for key in ("step", "epoch", "samples")
        )


if __name__ == "__main__":
    main()
