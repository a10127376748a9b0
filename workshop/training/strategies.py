"""What the scripts in ``strategies/`` share that is not the lesson: the model, the batches, the loss, and the report of a run.

Each script trains the same model on the same global batches in another way. ``workshop.demo.strategies`` starts them all and
compares what they report.
"""

import argparse
import gc
import json
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from workshop.data.code import load_blocks
from workshop.data.codellama import TINY, model_folder
from workshop.errors import UserError
from workshop.run.machine import gpus
from workshop.tensors import own_part
from workshop.training.arguments import ArgumentParser, check_averaging, positive_int, require_writable
from workshop.training.deepspeed import check_gathering
from workshop.training.device import BUS_FACTOR, synchronized_time

SEQUENCES, TOKENS = 8, 64  # of a global batch; of a sequence
SEED = 42
COUNTED = 3  # the step whose messages are counted; the memory is counted in it too: AdamW has its moments then
REPORT, WEIGHTS = "report.json", "weights.pt"


def parse_arguments(doc: str, options=None, *, fsdp: bool = False) -> argparse.Namespace:
    """Read a script's options: ``--steps``, ``--dtype``, ``--output``, and those that ``options(parser)`` adds.

    The number of processes has to divide the global batch, and torch and DeepSpeed have to be new enough for what the script
    uses (``fsdp``: for FSDP); anything else ends the program with one line and exit status 2.
    """
    parser = ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--steps", type=positive_int, default=20)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="of weights and activations")
    parser.add_argument("--output", default="runs/strategy", help="folder for losses, figures and final weights")
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
        if getattr(args, "stage", 0) == 3:  # of ZeRO
            check_gathering()
        require_writable(f"--output {args.output}", Path(args.output))
    except UserError as error:
        parser.error(error)
    return args


def choose_device() -> torch.device:
    """This process's accelerator where each process of this machine has one; else the CPU."""
    if gpus() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def load_model(args):
    """The tiny CodeLlama on the CPU, with the same weights in each process."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        model_folder(TINY), dtype=getattr(torch, args.dtype), local_files_only=True
    )


def load_batches(args, rank: int = 0, world_size: int = 1) -> list[torch.Tensor]:
    """This process's part of each global batch: int64 tensors of (``SEQUENCES`` / world_size) x ``TOKENS`` tokens, on the CPU."""
    from transformers import AutoTokenizer

    train_set, _ = load_blocks(
        "stdlib", AutoTokenizer.from_pretrained(model_folder(TINY), local_files_only=True), TOKENS
    )
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(SEED))[: SEQUENCES * args.steps]
    together = torch.stack([train_set[index] for index in order.tolist()]).split(SEQUENCES)
    return [batch[rank::world_size] for batch in together]


def loss_of(model, batch):
    """The mean loss of a next token, in the precision of the logits. (The model's own ``loss`` is in float32.)"""
    logits = model(input_ids=batch, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


class Report:
    """Losses, time, memory and messages of a run.

    Args:
        args: of ``parse_arguments``.
        device: that the process trains on.
    """

    def __init__(self, args, device: torch.device):
        self.args, self.device = args, device
        self.losses, self.seconds = [], []
        self.messages, self.memory = Messages(), None
        # Called after any optimizer's step, whoever calls it; the gradients are still there.
        self._hook = register_optimizer_step_post_hook(self._count_memory)
        self._start = synchronized_time(device)

    def _count_memory(self, *_):
        if len(self.losses) == COUNTED - 1 and self.memory is None:
            self.memory = tensor_bytes(self.device)

    def step(self, loss: torch.Tensor) -> None:
        """Note the end of a step, and its loss on this process."""
        self.losses.append(loss.detach())
        now = synchronized_time(self.device)
        if len(self.losses) != COUNTED:  # in which every operation was looked at
            self.seconds.append(now - self._start)
        if len(self.losses) == COUNTED - 1:
            self.messages.__enter__()
        elif len(self.losses) == COUNTED:
            self.messages.__exit__(None, None, None)
        done = len(self.losses)
        if (done % 10 == 0 or done == self.args.steps) and rank() == 0:
            print(f"step {done}/{self.args.steps}", flush=True)
        self._start = synchronized_time(self.device)

    def end(self, weights: dict[str, torch.Tensor]) -> None:
        """Write the report and, on rank 0, the whole weights. All processes call it, as long as they have their group."""
        self._hook.remove()
        losses = torch.stack(self.losses).double().cpu()
        held, sent = [self.memory or 0], [self.messages.bytes]
        if dist.is_initialized():
            losses = losses.to(self.device)
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
            together = torch.tensor([held[0], sent[0]], device=self.device, dtype=torch.int64)
            rows = [torch.zeros_like(together) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, together)
            held, sent = zip(*[row.tolist() for row in rows], strict=True)
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
        }
        folder = Path(self.args.output)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({name: tensor.detach().cpu() for name, tensor in weights.items()}, folder / WEIGHTS)
        (folder / REPORT).write_text(json.dumps(report, indent=1))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def tensor_bytes(device: torch.device) -> int:
    """The bytes of all tensors that Python knows in this process, each memory counted once; of a device, the allocator's peak.

    Called just after the optimizer's step these are weights, gradients, moments, and what a strategy keeps beside them.
    """
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated()
    found = {}
    for each in gc.get_objects():
        if not issubclass(type(each), torch.Tensor):
            continue
        for tensor in (each, each.grad if each.is_leaf else None):
            if tensor is None or (tensor := own_part(tensor)).device.type != device.type:
                continue
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


# What PyTorch's operations are called, and which of nccl-tests' collectives each of them is.
COLLECTIVES = (
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("broadcast", "broadcast"),
)


class Messages(TorchDispatchMode):
    """Counts, in a with-block, what this process sends in collectives.

    Attributes:
        bytes: by nccl-tests' formulas: of an all-reduce of S bytes on N processes each sends 2 (N-1)/N S, of an all-gather or
            reduce-scatter (N-1)/N S of the whole, of a broadcast S.
        calls: how often each collective was called.
    """

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = 0, {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        space, _, name = operation.name().partition("::")
        if space in ("c10d", "_c10d_functional"):
            kind = next((kind for part, kind in COLLECTIVES if part in name), None)
            if kind:
                sizes = [_bytes(arg) for arg in args]
                # The first tensors are what comes out, of an all-gather the whole; reduce_scatter's whole is what goes in.
                whole = max(sizes) if space == "c10d" and kind != "broadcast" else sizes[0]
                if space == "_c10d_functional" and kind == "all_gather":
                    whole *= dist.get_world_size()
                self.bytes += round(whole * BUS_FACTOR[kind](dist.get_world_size()))
                self.calls[kind] = self.calls.get(kind, 0) + 1
        return operation(*args, **(kwargs or {}))


def _bytes(value) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 0
