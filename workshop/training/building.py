"""Shared code of the programs in stage 06: their options, the text that they train on, and the log of a run.

Each program trains the same small transformer (``decoder.py``) on the same global batches.
"""

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from workshop.data.code import library_files
from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.training.arguments import PREFLIGHT, ArgumentParser, positive_int, require_writable
from workshop.training.decoder import Config
from workshop.training.device import local_device, synchronized_time
from workshop.training.launcher import exit_with_launcher
from workshop.training.traffic import Messages, tensor_bytes

SEED = 42
FILES = 12  # of the standard library: 400 kB of text
COUNTED = 3  # count what the process holds and sends in this step, when the optimizer already has its state
REPORT_EVERY = 10  # steps
LOSSES = "losses.json"
MIB = 1 << 20


def parse_arguments(doc: str, options=None, *, steps: int = 60, divides: str = "batch") -> argparse.Namespace:
    """Read the options of a program of stage 06. A mistake ends the program with one line and exit status 2.

    Args:
        doc: the docstring of the program.
        options: a function that adds the program's own options to the parser, or None.
        steps: the default number of steps.
        divides: what the number of processes must divide: "batch" (the sequences of a global batch), "length" (the tokens of a
            sequence; twice this number, because each process computes two pieces), "heads", "layers", or "" for nothing.

    Returns:
        The options, and the ``Config`` of the model as ``config``.
    """
    parser = ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--steps", type=positive_int, default=steps)
    parser.add_argument("--batch-size", type=positive_int, default=8, help="sequences per global batch")
    parser.add_argument("--length", type=positive_int, default=Config.length, help="tokens per sequence")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="of the parameters")
    parser.add_argument("--folder", default="runs/build", help="folder for the losses of the run")
    if options:
        options(parser)
    args = parser.parse_args()
    args.config = Config(**{name: getattr(args, name) for name in ("layers", "heads", "length") if hasattr(args, name)})
    args.dtype = getattr(torch, args.dtype)
    try:
        if "RANK" not in os.environ:
            raise UserError("start this program with torchrun: torchrun --standalone --nproc-per-node=2 " + sys.argv[0])
        check_division(int(os.environ["WORLD_SIZE"]), divides, args)
        check_combination(int(os.environ["WORLD_SIZE"]), args)
        require_writable(f"--folder {args.folder}", Path(args.folder))
    except UserError as error:
        parser.error(error)
    if os.environ.get(PREFLIGHT):
        sys.exit(0)
    return args


def check_division(processes: int, what: str, args: argparse.Namespace) -> None:
    """Raise a UserError if a number of processes does not divide what they are to share; ``what`` as for ``parse_arguments``."""
    config = args.config
    numbers = {
        "batch": (args.batch_size, processes, f"the {args.batch_size} sequences of a global batch"),
        "length": (
            config.length,
            2 * processes,
            f"the {config.length} tokens of a sequence into 2 equal pieces for each",
        ),
        "heads": (config.heads, processes, f"the {config.heads} heads of the attention"),
        "layers": (config.layers, processes, f"the {config.layers} layers of the model"),
    }
    if what in numbers:
        number, parts, words = numbers[what]
        if number % parts:
            raise UserError(f"{processes} processes do not divide {words}")


def check_combination(processes: int, args: argparse.Namespace) -> None:
    """Raise a UserError if a mesh, the micro-batches or the experts of a program cannot work with a number of processes."""
    config, stages, samples = args.config, processes, args.batch_size
    if hasattr(args, "tp"):
        from workshop.training.mesh import mesh_sizes  # its module imports DCP, which only this program needs

        sizes = mesh_sizes(args, processes)
        stages, samples = sizes["pp"], args.batch_size // sizes["dp"]
        if math.prod(sizes.values()) != processes:
            text = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise UserError(f"a mesh of {text} has {math.prod(sizes.values())} places for {processes} processes")
        if getattr(args, "pytorch", False) and sizes["cp"] > 1:  # only exercise 8 has this option
            raise UserError("--pytorch: use --cp 1, because PyTorch's context_parallel does not run on the CPU")
        for parts, what, number, words in (
            (sizes["dp"], "dp", args.batch_size, "sequences of a global batch"),
            (2 * sizes["cp"] * sizes["tp"], "2 x cp x tp", config.length, "tokens of a sequence"),
            (sizes["pp"], "pp", config.layers, "layers of the model"),
            (sizes["tp"], "tp", config.heads, "heads of the attention"),
        ):
            if number % parts:
                raise UserError(f"{what} = {parts} does not divide the {number} {words}")
    if hasattr(args, "microbatches"):
        count = args.microbatches
        if count < stages:
            raise UserError(f"{count} micro-batches are fewer than the {stages} stages; use at least {stages}")
        if samples % count:
            raise UserError(f"{count} micro-batches do not divide a batch of {samples} sequences")
    if hasattr(args, "experts") and args.experts % processes:
        raise UserError(f"{processes} processes do not divide the {args.experts} experts")


def run(train: Callable[[torch.device, argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Join the process group, call ``train(device, args)``, and leave the group.

    A ValueError ends the program with one line, which names the place where it was raised, and exit status 2.
    """
    exit_with_launcher()  # this process must end if torchrun is killed (kill -9)
    record(_run)(train, args)


def _run(train, args) -> None:
    device = local_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(device, args)
    except ValueError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        ArgumentParser().error(f"{error} ({Path(place.filename).name}:{place.lineno})")
    finally:
        dist.destroy_process_group()


def batches(args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the global batches of a run: inputs and targets, int64 tensors of batch size x length, on the CPU.

    The tokens are the bytes of modules of Python's standard library. The target of a token is the token after it.
    """
    text = b"".join(path.read_bytes() for path in library_files()[:FILES])
    tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    length = args.config.length
    chance = torch.Generator().manual_seed(SEED)
    for _ in range(args.steps):
        starts = torch.randint(len(tokens) - length, (args.batch_size,), generator=chance).tolist()
        blocks = torch.stack([tokens[start : start + length + 1] for start in starts]).long()
        yield blocks[:, :-1], blocks[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits (batch x length x vocabulary) for targets (batch x length)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Log:
    """Record the losses of a run, and what each process holds and sends. Rank 0 prints and writes.

    Args:
        args: the options from ``parse_arguments``.
        device: the device that the process trains on.
        done: the steps of the checkpoint from which the run continues.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, done: int = 0):
        self.args, self.device, self.done = args, device, done
        self.losses: list[float] = []  # of the global batches, as far as they are known
        self.steps = 0  # of this run
        self._own: list[torch.Tensor] = []  # the losses of this process since then, not a number where it has none
        self.messages, self.held = Messages(), 0
        # Called after each optimizer step, while the gradients still exist.
        self._hook = register_optimizer_step_post_hook(self._count_memory)
        if rank() == 0:
            print(f"training on {device.type}", flush=True)
        self._start = synchronized_time(device)

    def _count_memory(self, *_) -> None:
        if self.steps == COUNTED - 1 and not self.held:
            self.held = tensor_bytes(self.device)

    def step(self, loss: torch.Tensor | None) -> None:
        """Record the end of a step. Call it on all ranks.

        Args:
            loss: the mean over the tokens of this process. The loss of the step is the mean over all processes. None: this
                process has none, for example because the last process of a pipeline computes it.
        """
        self._own.append(torch.full((), torch.nan) if loss is None else loss.detach())
        self.steps += 1
        if self.steps == COUNTED - 1:
            self.messages.__enter__()
        elif self.steps == COUNTED:
            self.messages.__exit__(None, None, None)
        if (self.done + self.steps) % REPORT_EVERY == 0 or self.done + self.steps == self.args.steps:
            self.report()

    def report(self) -> list[float]:
        """Average the losses since the last report over the processes; rank 0 prints the last one."""
        own = torch.stack([each.double().to(self.device) for each in self._own])
        together = torch.stack([own.nan_to_num(), (~own.isnan()).double()])
        dist.all_reduce(together)
        losses = (together[0] / together[1]).tolist()
        self.losses += losses
        self._own = []
        if rank() == 0:
            print(f"step {self.done + self.steps}/{self.args.steps}: loss {losses[-1]:.4f}", flush=True)
        return losses

    def end(self) -> None:
        """Print what each process holds and sends, and write the losses. Call it on all ranks."""
        self._hook.remove()
        if self.steps == COUNTED - 1:
            self.messages.__exit__(None, None, None)
        if self._own:
            self.report()
        seconds = synchronized_time(self.device) - self._start
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self.held, self.messages.bytes, self.messages.calls))
        if rank() > 0:
            return
        if self.steps < COUNTED:
            print(f"A run of {COUNTED} or more steps also prints what each rank holds and sends")
        for number, (held, sent, calls) in enumerate(everyone if self.steps >= COUNTED else ()):
            words = ", ".join(f"{count} {name}" for name, count in sorted(calls.items())) or "no collectives"
            print(f"rank {number} holds {held / MIB:.2f} MiB and sends {sent / MIB:.2f} MiB in each step: {words}")
        tokens = self.args.batch_size * self.args.config.length * self.steps
        print(f"{tokens / seconds:,.0f} tokens/s", flush=True)
        folder = Path(self.args.folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / LOSSES, json.dumps({"losses": self.losses}))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
