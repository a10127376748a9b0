"""Shared code of the scripts in ``strategies/``: the model, the batches, the loss and the report of a run.

Each script trains the same model on the same global batches with a different strategy. ``workshop.demo.strategies``
starts all scripts and compares their reports.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from workshop.data.code import load_blocks
from workshop.data.codellama import TINY, model_folder
from workshop.errors import UserError
from workshop.training.arguments import ArgumentParser, check_averaging, positive_int, require_writable
from workshop.training.deepspeed import check_gathering
from workshop.training.device import local_device, synchronized_time
from workshop.training.timeline import Timeline, computing_share
from workshop.training.traffic import Messages, tensor_bytes

SEQUENCES, TOKENS = 8, 64  # per global batch; per sequence
SEED = 42
COUNTED = 3  # count messages and memory in this step, when AdamW already has its moments
TIMED = 5  # record the timeline of this step
REPORT, WEIGHTS, TIMELINE = "report.json", "weights.pt", "timeline.json"


def parse_arguments(doc: str, options=None, *, fsdp: bool = False) -> argparse.Namespace:
    """Read a script's options: ``--steps``, ``--dtype``, ``--output``, and those that ``options(parser)`` adds.

    This ends the program with one line and exit status 2 if the number of processes does not divide the global batch, or if
    torch or DeepSpeed is too old for the script (``fsdp``: it uses FSDP).
    """
    parser = ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--steps", type=positive_int, default=20)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="dtype of the model")
    parser.add_argument("--output", default="runs/strategy", help="folder for the report and the parameters")
    if options:
        options(parser)
    args = parser.parse_args()
    processes = getattr(args, "nproc", None) or int(os.environ.get("WORLD_SIZE", 1))
    try:
        if SEQUENCES % processes:
            raise UserError(
                f"{processes} processes do not divide the {SEQUENCES} sequences of a global batch; start 1, 2, 4 or 8"
            )
        if fsdp:
            check_averaging(parser)
        if getattr(args, "stage", 0) == 3:  # ZeRO-3
            check_gathering()
        require_writable(f"--output {args.output}", Path(args.output))
    except UserError as error:
        parser.error(error)
    return args


def choose_device() -> torch.device:
    """Return the visible GPU with the local rank of this process, or the CPU on a machine without a GPU."""
    return local_device()


def load_model(args):
    """Load the tiny CodeLlama on the CPU, with the same parameters in each process."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        model_folder(TINY), dtype=getattr(torch, args.dtype), local_files_only=True
    )


def load_batches(args, rank: int = 0, world_size: int = 1) -> list[torch.Tensor]:
    """Return this rank's part of each global batch: int64 tensors of (SEQUENCES / world_size) x TOKENS, on the CPU."""
    from transformers import AutoTokenizer

    train_set, _ = load_blocks(
        "stdlib", AutoTokenizer.from_pretrained(model_folder(TINY), local_files_only=True), TOKENS
    )
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(SEED))[: SEQUENCES * args.steps]
    together = torch.stack([train_set[index] for index in order.tolist()]).split(SEQUENCES)
    return [batch[rank::world_size] for batch in together]


def loss_of(model, batch):
    """Return the mean loss per token, in the precision of the logits. (The ``loss`` that the model returns is in float32.)"""
    return loss_of_logits(model(input_ids=batch, use_cache=False).logits, batch)


def loss_of_logits(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss per token of logits, which are sequences x TOKENS x vocabulary."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


class Report:
    """Record the losses, time, memory and messages of a run, and the timeline of a step.

    Args:
        args: the options from ``parse_arguments``.
        device: the device that the process trains on.
    """

    def __init__(self, args, device: torch.device):
        self.args, self.device = args, device
        self.losses, self.seconds = [], []
        self.messages, self.memory, self.timeline = Messages(), None, Timeline()
        # Called after each optimizer step, also of a library, while the gradients still exist.
        self._hook = register_optimizer_step_post_hook(self._count_memory)
        self._start = synchronized_time(device)

    def _count_memory(self, *_):
        if len(self.losses) == COUNTED - 1 and self.memory is None:
            self.memory = tensor_bytes(self.device)

    def step(self, loss: torch.Tensor) -> None:
        """Record the end of a step, and its loss on this process."""
        self.losses.append(loss.detach())
        now = synchronized_time(self.device)
        done = len(self.losses)
        if done not in (COUNTED, TIMED):  # recording slows these steps down
            self.seconds.append(now - self._start)
        if done == COUNTED - 1:
            self.messages.__enter__()
        elif done == COUNTED:
            self.messages.__exit__(None, None, None)
        elif done == TIMED:
            self.timeline.stop()
        if done == TIMED - 1 < self.args.steps - 1:
            self.timeline.start()
        if (done % 10 == 0 or done == self.args.steps) and rank() == 0:
            print(f"step {done}/{self.args.steps}", flush=True)
        self._start = synchronized_time(self.device)

    def end(self, weights: dict[str, torch.Tensor]) -> None:
        """Write the report and the full parameters on rank 0. Call this on all ranks before the process group is destroyed."""
        self._hook.remove()
        losses = torch.stack(self.losses).double().cpu()
        held, sent, timeline = [self.memory or 0], [self.messages.bytes], [self.timeline.pieces]
        if dist.is_initialized():
            losses = losses.to(self.device)
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
            together = torch.tensor([held[0], sent[0]], device=self.device, dtype=torch.int64)
            rows = [torch.zeros_like(together) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, together)
            held, sent = zip(*[row.tolist() for row in rows], strict=True)
            timeline = [None] * dist.get_world_size()
            dist.all_gather_object(timeline, self.timeline.pieces)
        if rank() > 0:
            return
        later = self.seconds[2:] or self.seconds  # the first steps warm up
        report = {
            "dtype": self.args.dtype,
            "device": self.device.type,
            "processes": dist.get_world_size() if dist.is_initialized() else 1,
            "losses": losses.tolist(),
            "tokens_per_second": SEQUENCES * TOKENS / statistics.median(later),
            "memory": max(held),
            "sent": max(sent),
            "calls": self.messages.calls,
            "computing": computing_share(timeline),
        }
        folder = Path(self.args.output)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({name: tensor.detach().cpu() for name, tensor in weights.items()}, folder / WEIGHTS)
        (folder / TIMELINE).write_text(json.dumps(timeline))
        (folder / REPORT).write_text(json.dumps(report, indent=1))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
