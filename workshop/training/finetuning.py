"""Check the options of the scripts of stage 04 before they write anything, and write their log."""

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.run.machine import gpus
from workshop.training.arguments import PREFLIGHT, check_averaging, is_restarted, require_writable
from workshop.training.deepspeed import check_gathering
from workshop.training.memory import estimate
from workshop.training.transformer import GIB, peak_flops, read_sizes


def check_finetuning(parser, args, strategy: str = "ddp") -> None:
    """End the run with one line and exit status 2 if it cannot run with ``args``. Afterwards, ``args.model`` is a folder.

    Args:
        parser: the parser of the script; its ``error`` ends the run.
        args: the options ``model``, ``data``, ``skip_broken``, ``batch_size``, ``sequence_length`` and ``folder``, and, if
            the script has them, ``accumulate``, ``activation_checkpointing``, ``offload`` and ``save_every``.
        strategy: how the script distributes the model, to estimate its memory: "ddp", "fsdp", "zero3" or "lora".
    """
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    try:
        if world_size < 1:
            raise UserError("start this program with torchrun: torchrun --standalone --nproc-per-node=2 " + sys.argv[0])
        if strategy == "fsdp":
            check_averaging(parser)
        if strategy == "zero3":
            check_gathering()
        _check_model(args, strategy, world_size)
        _check_text(args, world_size)
        require_writable(f"--folder {args.folder}", Path(args.folder))
        if hasattr(args, "save_every"):
            _check_checkpoint(args)
    except UserError as error:
        parser.error(error)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    if os.environ.get(PREFLIGHT):
        sys.exit(0)
    explain_out_of_memory(args)


def explain_out_of_memory(args) -> None:
    """Make an uncaught out-of-memory error of a GPU print a sentence on standard error instead of a traceback.

    Args:
        args: the options ``model``, ``batch_size`` and ``sequence_length``.
    """
    import torch

    before = sys.excepthook

    def explain(kind, error, traceback):
        if not issubclass(kind, torch.OutOfMemoryError):
            return before(kind, error, traceback)
        tried = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        print(
            f"out of memory{f' when allocating {tried[1]} more' if tried else ''}, with --batch-size {args.batch_size:,} of "
            f"{args.sequence_length:,} tokens. Reduce --batch-size or --sequence-length, use --activation-checkpointing and "
            f"--offload of exercise 3, or FSDP on more GPUs. See what would fit: ./workshop.sh memory {args.model}",
            file=sys.stderr,
        )

    sys.excepthook = explain


def _check_model(args, strategy, world_size):
    from workshop.data.codellama import model_folder

    args.model = str(model_folder(args.model))
    sizes = read_sizes(args.model)
    if args.sequence_length > sizes.context:
        raise UserError(
            f"--sequence-length {args.sequence_length:,}: the model in {args.model} takes sequences of up to "
            f"{sizes.context:,} tokens"
        )
    if args.sequence_length < 2:
        raise UserError("--sequence-length 1: there is nothing after the first token to predict")
    check_memory(args, sizes, strategy, world_size)


def check_memory(args, sizes, strategy: str, world_size: int) -> None:
    """Raise a UserError if training would take more memory than is available to each process.

    Args:
        args: as in ``check_finetuning``.
        sizes: the sizes of the model.
        strategy: a strategy of ``estimate``.
        world_size: the number of processes.
    """
    import psutil
    import torch

    from workshop.tensors import bf16_is_fast
    from workshop.training.device import gpu_memory, local_index

    on_gpu = gpus() > 0
    if on_gpu:
        device = torch.device(torch.accelerator.current_accelerator().type, local_index())
        available, place = gpu_memory(device.index), "this GPU has"
    else:
        device = torch.device("cpu")
        available, place = (
            psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            "this machine has free for each process",
        )
    needed = estimate(
        sizes,
        strategy,
        world_size,
        batch_size=args.batch_size,
        sequence_length=args.sequence_length,
        bf16=bf16_is_fast(device),
        checkpointing=getattr(args, "activation_checkpointing", False),
        offload=on_gpu and getattr(args, "offload", False),  # on a CPU, there is nowhere to offload to
        on_gpu=on_gpu,
    )
    if needed.peak > available:
        standing = needed.parameters + needed.gradients + needed.optimizer
        raise UserError(
            f"this needs about {needed.peak / GIB:,.1f} GiB in each process ({standing / GIB:,.1f} for parameters, gradients and "
            f"optimizer state, {needed.activations / GIB:,.1f} for activations), but {place} {available / GIB:,.1f}; "
            f"see what would fit: ./workshop.sh memory {args.model}"
        )


def _check_text(args, world_size):
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from workshop.data.code import load_blocks

    logging.disable_progress_bar()  # each process would show one while it loads a model
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    except Exception as error:  # what it raises on a damaged file differs from version to version
        raise UserError(
            f"the tokenizer in {args.model} cannot be read ({type(error).__name__}); fetch or create it again"
        ) from error
    train_set, validation_set = load_blocks(args.data, tokenizer, args.sequence_length, args.skip_broken)
    if world_size > len(validation_set):
        raise UserError(
            f"{world_size:,} processes are more than the {len(validation_set):,} sequences to validate with; start fewer"
        )
    step = args.batch_size * world_size * getattr(args, "accumulate", 1)
    if step > len(train_set):
        raise UserError(
            f"--batch-size {args.batch_size:,} on {world_size:,} process{'es' * (world_size > 1)} needs {step:,} sequences per "
            f"step; {args.data} has {len(train_set):,} of {args.sequence_length:,} tokens to train on"
        )


def _check_checkpoint(args):
    """Raise a UserError if the run cannot resume from the newest checkpoint in its folder."""
    newest = newest_checkpoint(args.folder)
    if newest is None:
        return
    _check_size(newest, args.model, "choose a different --folder")
    done, asked = _step(newest), _read_log(Path(args.folder)).get("options", {}).get("steps", args.steps)
    if asked != args.steps:
        raise UserError(
            f"the run in {args.folder} has {asked:,} steps, and its learning rate reaches its final value there: "
            f"use --steps {asked}, or choose a different --folder and, as --model, the model that this run exported"
        )
    if done >= args.steps and not is_restarted():
        raise UserError(
            f"{args.folder} already holds {done:,} steps of the {args.steps:,} asked for, so there is nothing left to train; "
            "choose a different --folder, or delete it to start again"
        )


def _check_size(checkpoint, model, advice):
    """Raise a UserError if a checkpoint cannot be read, or belongs to a model of a different size."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except Exception as error:  # what it raises on a damaged file differs from version to version
        raise UserError(f"the checkpoint {checkpoint} cannot be read ({type(error).__name__}); delete it") from error
    sizes = read_sizes(model)
    layers = {name.split(".layers.")[1].split(".")[0] for name in saved if ".model.model.layers." in name}
    shapes = [tuple(entry.size) for name, entry in saved.items() if name.endswith(".model.model.embed_tokens.weight")]
    if shapes != [(sizes.vocabulary, sizes.hidden)] or len(layers) != sizes.layers:
        raise UserError(f"the checkpoint {checkpoint} belongs to a model of a different size than {model}; {advice}")


def check_export(parser, args) -> None:
    """Check the options of a program that exports a checkpoint. Afterwards, ``args.model`` is a folder.

    Args:
        parser: the parser of the program; its ``error`` ends the program.
        args: the options ``model``, ``folder`` (with the checkpoints) and ``export``.
    """
    from workshop.data.codellama import model_folder

    try:
        args.model = str(model_folder(args.model))
        if (checkpoint := newest_checkpoint(args.folder)) is None:
            raise UserError(
                f"--folder {args.folder}: there is no complete checkpoint; train first, or give the folder of a run"
            )
        _check_size(checkpoint, args.model, "name that model with --model")
        require_writable(f"--export {args.export}", Path(args.export))
    except UserError as error:
        parser.error(error)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")


def newest_checkpoint(run: str | os.PathLike) -> Path | None:
    """Return the newest complete checkpoint in the folder of a run, or None. DCP writes the file ``.metadata`` last."""
    whole = [path.parent for path in Path(run).glob("step-*/.metadata")]
    return max(whole, key=_step, default=None)


def keep_newest(run: str | os.PathLike) -> None:
    """Delete all checkpoints before the newest complete one. Only rank 0 does this; the other ranks return."""
    import torch.distributed as dist

    newest = newest_checkpoint(run)
    if dist.get_rank() > 0 or not newest:
        return
    for folder in Path(run).glob("step-*"):
        if _step(folder) < _step(newest):
            shutil.rmtree(folder)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@dataclass(frozen=True)
class Training:
    """The log of a run of stage 04.

    Attributes:
        entries: its reports, as ``TrainingLog`` wrote them; the first report comes before the first step.
        completions: what the model wrote after the prompt, at each start and at the end.
        device: the type of the device that the run used.
    """

    entries: list[dict]
    completions: list[str]
    device: str = ""

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [loss for entry in self.entries for loss in entry.get("losses", [])]

    @property
    def validation(self) -> list[float]:
        """The validation loss of each report."""
        return [entry["validation_loss"] for entry in self.entries]


def read_training(folder: str | os.PathLike) -> Training:
    """Read the log of a run from its folder."""
    log = _read_log(Path(folder))
    completions = [completion["text"] for completion in log.get("completions", [])]
    return Training(log.get("entries", []), completions, log.get("device", ""))


def _read_log(folder: Path) -> dict:
    """Read the log of an earlier run from this folder; return {} if there is none that can be read."""
    try:
        return json.loads((folder / "log.json").read_text())
    except (OSError, ValueError):
        return {}


class TrainingLog:
    """Write the log of a run: lines on standard output, and ``log.json`` in the folder of the run. Only rank 0 writes.

    Create it on all ranks, after the process group.

    Args:
        args: the options ``folder``, ``model``, ``steps``, ``batch_size``, ``sequence_length`` and, if it exists, ``accumulate``.
        device: the device that this process trains on.
    """

    def __init__(self, args, device):
        import torch.distributed as dist

        self.args, self.device = args, device
        self.rank, self.processes = dist.get_rank(), dist.get_world_size()
        self.sizes = read_sizes(args.model)
        self.path = Path(args.folder) / "log.json"
        self.peak = peak_flops(device)

    def begin(self, validation_loss: float, completion: str, step: int = 0) -> None:
        """Report the model, the first step and the loss at the start.

        Args:
            validation_loss: mean loss per token, in nats.
            completion: what the model writes after a prompt.
            step: the step of the checkpoint that the run resumes from; the log drops its entries of later steps.
        """
        if self.rank > 0:
            return
        from workshop.run.machine import machine

        earlier = _read_log(self.path.parent) if step else {}
        self.entries = [entry for entry in earlier.get("entries", []) if entry["step"] <= step]
        self.run = {
            "model": Path(self.args.model).name,
            "parameters": self.sizes.parameters,
            "device": self.device.type,
            "processes": self.processes,
            "options": {name: value for name, value in vars(self.args).items() if name not in ("model", "folder")},
            "machine": machine(),
            "flops_per_token": self.sizes.flops_per_token(self.args.sequence_length),
            "peak": self.peak and {"flops": self.peak[0], "device": self.peak[1]},
            "completions": [*earlier.get("completions", []), {"step": step, "text": completion}],
            "entries": self.entries,
        }
        if not self.entries:
            self.entries.append({"step": 0, "validation_loss": validation_loss})
        print(
            f"training {self.sizes.parameters / 1e6:,.1f} million parameters on {self.device} from step {step + 1}: "
            f"{self.processes} process{'es' * (self.processes > 1)}, validation loss {validation_loss:.4f}, completion:\n"
            + _quoted(completion),
            flush=True,
        )
        self._save()

    def write(self, step: int, losses: list[float], validation_loss: float, seconds: float) -> None:
        """Report the steps since the last report.

        Args:
            step: the number of the last of these steps, counted from 1.
            losses: the loss of each step: the mean over the global batch, in nats.
            validation_loss: mean loss per token, in nats.
            seconds: how long these steps took.
        """
        if self.rank > 0:
            return
        from workshop.training.device import peak_memory

        sequences = self.args.batch_size * getattr(self.args, "accumulate", 1) * self.processes
        rate = len(losses) * sequences * self.args.sequence_length / seconds
        entry = {
            "step": step,
            "losses": losses,
            "validation_loss": validation_loss,
            "tokens_per_second": rate,
            "peak_memory": peak_memory(self.device),
        }
        used = ""
        if self.peak:
            entry["mfu"] = rate * self.run["flops_per_token"] / (self.peak[0] * self.processes)
            used = f" | {entry['mfu']:.1%} of {self.peak[1]}'s {self.peak[0] / 1e12:,.0f} TFLOP/s"
        self.entries.append(entry)
        print(
            f"step {step}/{self.args.steps} | loss {sum(losses) / len(losses):.4f} | validation loss {validation_loss:.4f} | "
            f"{rate:,.0f} tokens/s{used} | {entry['peak_memory'] / GIB:.2f} GiB",
            flush=True,
        )
        self._save()

    def end(self, completion: str) -> None:
        """Show what the trained model writes after the prompt."""
        if self.rank > 0:
            return
        self.run["completions"].append({"step": self.args.steps, "text": completion})
        print(f"completion after {self.args.steps} steps:\n{_quoted(completion)}", flush=True)
        self._save()

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self.run, indent=1) + "\n")


def _quoted(completion: str) -> str:
    return "\n".join("    | " + line for line in completion.splitlines())


def parse_extra(doc: str, group: str = "", purpose: str = ""):
    """Parse and check the options of a script that compares a kind of parallelism with one process.

    Args:
        doc: the script's docstring.
        group: the option for the size of the inner groups, which must divide the number of processes; "": no such option.
        purpose: the help text of that option.
    """
    from workshop.data.codellama import TINY, model_folder
    from workshop.training.arguments import ArgumentParser, positive_int

    parser = ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--steps", type=positive_int, default=10)
    if group:
        parser.add_argument(group, type=positive_int, default=2, help=purpose)
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    size = getattr(args, group.lstrip("-")) if group else world_size
    try:
        if world_size < 1:
            raise UserError(f"start this program with torchrun: torchrun --standalone --nproc-per-node=4 {sys.argv[0]}")
        if group:  # these scripts use FSDP, which averages; tensor parallelism alone only needs sums
            check_averaging(parser)
        if world_size % size:
            raise UserError(f"{group} {size}: {world_size} processes do not divide into groups of {size}")
        heads = read_sizes(model_folder(TINY)).heads
        if group != "--shards" and heads % size:
            raise UserError(f"the {heads} attention heads of this model do not divide into {size} parts")
        if args.steps > 1000:
            raise UserError(
                f"--steps {args.steps:,}: at most 1,000, because the text is limited; a few are enough to compare the losses"
            )
        if 16 % world_size:
            raise UserError(f"batches of 16 sequences do not divide into {world_size} equal shares")
    except UserError as error:
        parser.error(error)
    if os.environ.get(PREFLIGHT):
        sys.exit(0)
    return args


def first_batches(args, device) -> list:
    """Return the first ``args.steps`` batches of 16 sequences of 64 tokens of Python source, the same on every rank."""
    import torch
    from transformers import AutoTokenizer

    from workshop.data.code import load_blocks
    from workshop.data.codellama import TINY, model_folder

    train_set, _ = load_blocks("stdlib", AutoTokenizer.from_pretrained(model_folder(TINY), local_files_only=True), 64)
    blocks = torch.stack([train_set[index] for index in range(16 * args.steps)])
    return list(blocks.to(device).split(16))


def compare_losses(name: str, losses: list[float], alone: list[float]) -> None:
    """Print the losses beside those of one process, and the largest difference between them; only on rank 0."""
    import torch.distributed as dist

    if dist.get_rank() > 0:
        return
    print(f"step | {name} | one process")
    for step, (together, one) in enumerate(zip(losses, alone, strict=True), start=1):
        print(f"{step:4} | {together:{len(name)}.6f} | {one:.6f}")
    difference = max(abs(together - one) for together, one in zip(losses, alone, strict=True))
    print(f"{dist.get_world_size()} processes; the losses differ by at most {difference:.1e}", flush=True)
