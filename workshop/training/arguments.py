"""Check the options of the stage scripts: a mistake ends the run with one line and exit status 2, before it writes anything."""

import argparse
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from workshop.errors import UserError
from workshop.run.machine import gpus
from workshop.training.container import closed_to_gpus

PREFLIGHT = "WORKSHOP_PREFLIGHT"  # set by workshop.training.preflight: check the options, do not train


# "--snapshot" was the name in 0.1. Learners may have programs and job scripts that still use it, so it works in 0.2 too.
RENAMED = {"--checkpoint": "--snapshot", "--snapshot": "--checkpoint"}


class ArgumentParser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, without the usage text. Under torchrun, rank 0 prints it for all ranks."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False, **kwargs)

    def add_argument(self, *names, **options):
        """Add an option. A program that declares an option under its old or its new name accepts both names."""
        action = super().add_argument(*names, **options)
        for other in (RENAMED[name] for name in names if name in RENAMED):
            super().add_argument(other, dest=action.dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return action

    def parse_args(self, args=None, namespace=None):
        """Parse the options. End the run if the container hides the GPUs of the node, because it would train on the CPU."""
        parsed = super().parse_args(args, namespace)
        if closed := closed_to_gpus():
            self.error(closed)
        return parsed

    def error(self, message):
        """Print the message on standard error and exit with status 2."""
        if _rank() > 0:
            time.sleep(10)  # torchrun and srun end all ranks when one exits: let rank 0 print and exit first
            print(
                f"{self.prog}: rank {_rank()}: {' '.join(str(message).split())}",
                file=sys.stderr,
                flush=True,
            )
        elif os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            print(f"{self.prog}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
        sys.exit(2)


def _rank() -> int:
    """Return the rank that torchrun or srun gave to this process, or 0 if neither started it."""
    task = os.environ.get("SLURM_PROCID", 0) if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 else 0
    return int(os.environ.get("RANK", task))


def positive_int(text: str) -> int:
    """Convert an option's text to a whole number of at least 1, for ``add_argument(type=positive_int)``."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return number


def positive_float(text: str) -> float:
    """Convert an option's text to a finite number above 0, for ``add_argument(type=positive_float)``."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


def check_arguments(
    parser: ArgumentParser,
    args: argparse.Namespace,
    model=None,
    *,
    world_size: int,
    datasets: tuple[str, ...] = ("digits", "mnist"),
) -> None:
    """End the run with one line and exit status 2 if the program cannot run with ``args``.

    Args:
        parser: the parser of the script; its ``error`` ends the run.
        args: the option ``batch_size`` (samples per step on each process) and, if the script has them, ``epochs``,
            ``accumulate`` (batches per step), ``dataset``, ``checkpoint`` (a file) and ``folder`` (of checkpoints).
        model: a model as the script creates it, on the CPU, to check that the checkpoint fits; None: do not check this. The
            check loads the checkpoint into the model, so create one only for this purpose.
        world_size: the number of processes; 0 if the launcher that sets it is missing.
        datasets: the data sets whose images fit the model.
    """
    try:
        if world_size < 1:
            raise UserError("start this program with torchrun: torchrun --standalone --nproc-per-node=2 " + sys.argv[0])
        _check_data(args, world_size, datasets)
        if checkpoint := getattr(args, "checkpoint", getattr(args, "snapshot", None)):
            _check_checkpoint(Path(checkpoint), args.epochs, model)
        if hasattr(args, "folder"):
            _check_folder(args, model)
    except UserError as error:
        parser.error(error)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    if os.environ.get(PREFLIGHT):
        sys.exit(0)


def check_launcher(parser: ArgumentParser, devices: int, nodes: int | None = None) -> None:
    """End a Lightning program with one line and exit status 2 if its launcher did not start the processes that the options name.

    Args:
        parser: the parser of the script.
        devices: the number of processes per node.
        nodes: the number of nodes; None: the program runs on one node, and Lightning detects which launcher started it.
    """
    options = f"--devices {devices}" if nodes is None else f"--nodes {nodes} --devices {devices}"
    knows_one, nodes = nodes is None, nodes or 1
    number = devices * nodes
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        started = int(environment["WORLD_SIZE"])
        if started != number:
            where = "--standalone" if number == devices else f"--nnodes={nodes}"
            parser.error(
                f"torchrun started {started} processes, but {options} asks for {number}; change these options, "
                f"or start the program with torchrun {where} --nproc-per-node={devices}"
            )
        return
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        started, on = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment.get("SLURM_STEP_NUM_NODES", 1))
        if (started, on) != (number, nodes):
            parser.error(
                f"srun started {started} tasks on {on} node{'s' * (on > 1)}, but {options} asks for {number} on "
                f"{nodes}; change these options, or start the program with srun --nodes={nodes} --ntasks-per-node={devices}"
            )
        if "SLURM_NTASKS_PER_NODE" not in environment:
            parser.error(
                f"Lightning needs the number of tasks per node from srun: use --ntasks-per-node={devices} instead of --ntasks"
            )
        return
    if nodes > 1:
        parser.error(
            f"{options}: no launcher started the processes on the other nodes; start this program with srun or torchrun"
        )
    if (
        knows_one
        and number > 1
        and "SLURM_NTASKS" in environment
        and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    ):
        parser.error(
            "this shell belongs to a Slurm job, so Lightning would take the program for the only task of that job; start it "
            "with srun, or with the runner beside it, whose name begins with exerciseK_run_"
        )


def check_averaging(parser: ArgumentParser) -> None:
    """End a program that uses FSDP with one line and exit status 2 if FSDP would not average its gradients.

    With torch 2.8, gloo silently adds up where FSDP asks for an average: https://github.com/pytorch/pytorch/issues/162338

    Args:
        parser: the parser of the script.
    """
    import torch

    if not gpus() and tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9):
        parser.error(
            f"torch {torch.__version__}: on CPUs, FSDP adds up the gradients of all processes instead of averaging them; "
            "install torch 2.9 or newer"
        )


def _check_data(args, world_size, datasets):
    from workshop.data import DATASETS, load_dataset

    dataset, accumulate = getattr(args, "dataset", "digits"), getattr(args, "accumulate", 1)
    if dataset in DATASETS and dataset not in datasets:
        raise UserError(
            f"--dataset {dataset}: its images do not fit this program's model; choose from: {', '.join(datasets)}"
        )
    train_set, test_set = load_dataset(dataset)
    smaller = min(len(train_set), len(test_set))
    if world_size > smaller:
        raise UserError(f"{world_size:,} processes are more than the {smaller:,} samples of {dataset}; start fewer")
    if args.batch_size * world_size * accumulate > len(train_set):
        portions = f" with --accumulate {accumulate:,}" if accumulate > 1 else ""
        raise UserError(
            f"--batch-size {args.batch_size:,}{portions} on {world_size:,} process{'es' * (world_size > 1)} needs "
            f"{args.batch_size * world_size * accumulate:,} samples per step; {dataset} has {len(train_set):,} to train on"
        )


def _check_checkpoint(path, epochs, model):
    import torch

    if path.suffix == ".jsonl":
        raise UserError(
            f"--checkpoint {path}: the log of the run will have this name; choose a different one, such as run.pt"
        )
    if path.is_dir():
        raise UserError(f"--checkpoint {path} is a folder; name a file in it")
    lightning = hasattr(model, "training_step")
    if lightning and path.suffix != ".ckpt":
        raise UserError(
            f"--checkpoint {path}: Lightning checkpoints end in .ckpt, so it would write a different file; try run.ckpt"
        )
    require_writable(f"--checkpoint {path}", path.absolute().parent)
    if not path.exists():
        return
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises on a damaged file differs from version to version
        raise UserError(
            f"--checkpoint {path} cannot be read ({type(error).__name__}: damaged, incomplete, or not a checkpoint); "
            "delete it or choose a different file"
        ) from error
    if model is None:
        return
    # Lightning uses different names for the same entries.
    weights, optimizer = ("state_dict", "optimizer_states") if lightning else ("model", "optimizer")
    try:
        model.load_state_dict(checkpoint[weights])
        done = checkpoint["epoch"] + 1
        checkpoint[optimizer]
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"--checkpoint {path} does not fit this model (a different program wrote it); delete it or choose a different file"
        ) from error
    _require_epochs_left(f"--checkpoint {path}", done, epochs)


def _check_folder(args, model):
    require_writable(f"--folder {args.folder}", Path(args.folder))
    saved = [path.name.removeprefix("epoch-") for path in Path(args.folder).glob("epoch-*")]
    done = 1 + max((int(number) for number in saved if number.isdecimal()), default=-1)
    _require_epochs_left(f"--folder {args.folder}", done, args.epochs)
    for newest in sorted(Path(args.folder).glob("step-*[0-9]"))[-1:] if model else ():
        _require_same_model(f"--folder {args.folder}: {newest.name}", newest, model)


def _require_same_model(what, checkpoint, model):
    """Raise a UserError if a distributed checkpoint belongs to a different model. The program itself skips a damaged one."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except Exception:  # what it raises on a damaged file differs from version to version
        return
    own = {f"state.model.{name}": tuple(value.shape) for name, value in model.state_dict().items()}
    if own != {name: tuple(entry.size) for name, entry in saved.items() if name.startswith("state.model.")}:
        raise UserError(
            f"{what} does not fit this model (a different program wrote it); delete it or choose a different folder"
        )


def _require_epochs_left(option, done, asked):
    if done >= asked and not is_restarted():
        raise UserError(
            f"{option} already holds {done} epoch{'s' * (done > 1)} of the {asked} asked for, "
            "so there is nothing left to train; raise --epochs, or delete it to start again"
        )


def require_writable(option: str, folder: Path) -> None:
    """Raise a UserError that begins with ``option`` if a folder is not writable or cannot be created.

    The check leaves nothing behind, because it writes only into a temporary folder.
    """
    whole = Path(os.path.normpath(folder.absolute()))
    try:
        existing = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
        if not existing.exists():
            raise UserError(f"{option}: {existing} is a link to a place that does not exist")
        if not existing.is_dir():
            raise UserError(f"{option}: {existing} is a file, so nothing can be written beneath it")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"{option}: no permission to write in {existing}")
        if _rank() == 0:
            # Try to write: for root, and on network file systems, the permissions say little.
            before = existing.stat()
            with tempfile.TemporaryDirectory(prefix=".workshop-", dir=existing) as trial:
                Path(trial, whole.relative_to(existing)).mkdir(parents=True, exist_ok=True)
            with suppress(PermissionError):  # only the owner may reset the times of the folder
                os.utime(existing, ns=(before.st_atime_ns, before.st_mtime_ns))
    except OSError as error:
        raise UserError(f"{option}: cannot write in {folder} ({error.strerror}); choose a different folder") from error


def is_restarted() -> bool:
    """Return whether the launcher restarted this process. The last checkpoint may then be complete, with nothing left to train.

    torchrun restarts all ranks when one has died, and Slurm requeues a job whose node has failed. (Outside an srun step, it may
    be a Jupyter session that Slurm has requeued.)
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or (
        "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    )
