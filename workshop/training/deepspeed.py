"""Check the DeepSpeed configuration for the scripts of stage 05, before they write anything."""

import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from workshop.errors import UserError
from workshop.run.machine import gpus
from workshop.training.arguments import check_arguments, require_writable

# Blocks of the configuration whose names are not constants of deepspeed.runtime.config, because other modules read them.
BLOCKS = frozenset(
    """zero_optimization activation_checkpointing aio amp autotuning comet comms_logger compile csv_monitor flops_profiler
    hybrid_engine pipeline tensor_parallel tensorboard timers wandb""".split()  # noqa: SIM905 - names are easier to read this way
)


def require_deepspeed() -> None:
    """End the program with one line and exit status 2 if DeepSpeed is not installed. Call it before ``import deepspeed``.

    DeepSpeed chooses the type of device when it is imported. On a machine without a GPU, this function makes it choose the CPU.
    DeepSpeed uses LOCAL_RANK as the index of the GPU. If a job shows each process only its own GPU, the only index is 0, so
    this function sets LOCAL_RANK to 0.
    """
    if not importlib.util.find_spec("deepspeed"):
        print(
            "DeepSpeed is not installed here; run pip install -e '.[deepspeed]' in the folder of the workshop",
            file=sys.stderr,
        )
        sys.exit(2)
    take_own_ninja()
    # It would warn in each process that there is a CUDA compiler but no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if not (visible := gpus()):
        os.environ["DS_ACCELERATOR"] = "cpu"
        return
    # DeepSpeed requires that Open MPI has set the same number.
    for name in {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys():
        os.environ[name] = str(int(os.environ[name]) % visible)


def check_gathering() -> None:
    """Raise a UserError if ZeRO-3 would compute with parameters that are not gathered yet.

    After a step, DeepSpeed gathers each small parameter with a separate all-gather. Before 0.19.8, it waited only for the last
    one. A GPU runs them in order, but gloo does not: https://github.com/deepspeedai/DeepSpeed/pull/8539
    """
    from packaging.version import Version

    version = importlib.metadata.version("deepspeed")
    if os.environ.get("DS_ACCELERATOR") == "cpu" and Version(version) < Version("0.19.8"):
        raise UserError(
            f"DeepSpeed {version}: on CPUs, ZeRO-3 does not wait until all parameters are gathered, so it trains with "
            "wrong values; install DeepSpeed 0.19.8 or newer"
        )


def check_zero(parser, args) -> dict:
    """Return the DeepSpeed configuration, or end the run with one line and exit status 2 if it cannot run with ``args``.

    Args:
        parser: the parser of the script; its ``error`` ends the run.
        args: the options ``config`` (a file), ``batch_size`` (samples per step on each process; it replaces the
            value in the file), ``dataset``, ``folder`` and ``export``.

    Returns:
        The configuration from the file, with ``args.batch_size`` as ``train_micro_batch_size_per_gpu``.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    try:
        config = load_config(args.config, args.batch_size, world_size)
        check_checkpoint(config, Path(args.folder), world_size)
        if args.export:
            require_writable(f"--export {args.export}", Path(args.export).absolute().parent)
    except UserError as error:
        parser.error(error)
    args.accumulate = config.get("gradient_accumulation_steps", 1)
    check_arguments(parser, args, world_size=world_size)
    return config


def load_config(path: str, batch_size: int, world_size: int) -> dict:
    """Read the DeepSpeed configuration from a file and set ``batch_size`` samples per step on each process.

    Raises:
        UserError: the file cannot be read, does not fit ``world_size`` processes, or DeepSpeed cannot start here.
    """
    config = read_config(path)
    config["train_micro_batch_size_per_gpu"] = batch_size
    check_config(config, path, world_size)
    check_compiler()
    return config


def read_config(path: str) -> dict:
    """Read the DeepSpeed configuration from a JSON file.

    Raises:
        UserError: the file cannot be read, or is not a JSON object.
    """
    try:
        config = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--config {path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"--config {path}: the DeepSpeed configuration must be a JSON object, {{...}}")
    return config


def check_config(config: dict, path: str, world_size: int) -> None:
    """Raise a UserError that names the key if DeepSpeed would stop, or would ignore a setting.

    Args:
        config: the configuration.
        path: the file that it comes from.
        world_size: the number of processes; 0 if it is not known.
    """
    import torch
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def refuse(what: str):
        raise UserError(f"--config {path}: {what}")

    if unknown := sorted(config.keys() - known_keys()):
        refuse(f"DeepSpeed has no key {unknown[0]!r} and would ignore it")
    for block in ("zero_optimization", "fp16", "bf16"):
        if not isinstance(config.get(block, {}), dict):
            refuse(f'"{block}" must be a JSON object, {{...}}, not {json.dumps(config[block])}')
    zero = config.get("zero_optimization", {})
    fields = DeepSpeedZeroConfig.model_fields
    names = {name for name, field in fields.items()} | {field.alias for field in fields.values() if field.alias}
    if unknown := sorted(zero.keys() - names):
        refuse(f'"zero_optimization" has no key {unknown[0]!r}')
    if (stage := zero.get("stage", 0)) not in (0, 1, 2, 3):
        refuse(f'"stage" of "zero_optimization" must be 0, 1, 2 or 3, not {stage!r}')
    if stage == 3:
        check_gathering()
    for key in ("gradient_accumulation_steps", "train_batch_size"):
        if key in config and not (type(config[key]) is int and config[key] > 0):
            refuse(f'"{key}" must be a whole number of at least 1, not {json.dumps(config[key])}')
    micro, accumulate = config["train_micro_batch_size_per_gpu"], config.get("gradient_accumulation_steps", 1)
    whole = config.get("train_batch_size", micro * accumulate * world_size)
    if world_size and whole != micro * accumulate * world_size:
        refuse(
            f'"train_batch_size" is {whole}, but {micro} samples x {accumulate} batches x {world_size} '
            f"processes are {micro * accumulate * world_size}; leave the key out"
        )
    if config.get("fp16", {}).get("enabled") and not torch.accelerator.is_available():
        refuse('"fp16" needs a GPU; use "bf16", which CPUs support too')


def known_keys() -> set[str]:
    """Return the top-level keys that the installed DeepSpeed reads; it ignores all others.

    They are the values of the constants of ``deepspeed.runtime.config``, and ``BLOCKS``. (These are a few too many,
    because the module also has constants for values and for keys within blocks.)
    """
    from deepspeed.runtime import config

    constants = {value for name, value in vars(config).items() if name.isupper() and isinstance(value, str)}
    return constants | BLOCKS


def check_checkpoint(config: dict, folder: Path, world_size: int) -> None:
    """Raise a UserError if the checkpoint in a folder is from a different number of processes, or a different ZeRO stage.

    Args:
        config: the configuration.
        folder: the folder of the checkpoints; it does not have to exist.
        world_size: the number of processes; 0 if it is not known.
    """
    latest = folder / "latest"
    if not latest.is_file():
        return
    place = folder / latest.read_text().strip()
    parts = len(list(place.glob("*zero_pp_rank_*_optim_states.pt")))  # ZeRO writes one per process
    spread = bool(list(place.glob("*zero_pp_rank_*_model_states.pt")))  # ZeRO-3 shards the parameters too
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if parts and world_size and parts != world_size:
        raise UserError(
            f"--folder {folder} contains a checkpoint of {parts} process{'es' * (parts > 1)}, which {world_size} cannot load; "
            f"start {parts}, or choose a different folder ({folder}/zero_to_fp32.py combines the parameters)"
        )
    if bool(parts) != (stage > 0) or spread != (stage == 3):
        was = "3" if spread else "1 or 2" if parts else "0"
        raise UserError(
            f"--folder {folder} contains a checkpoint of ZeRO stage {was}, which stage {stage} cannot load; use that stage, or "
            "choose a different folder"
        )


def check_compiler() -> None:
    """Raise a UserError if DeepSpeed cannot compile its extension for CPUs, which it does at the first start."""
    import torch

    if not torch.accelerator.is_available() and not is_built() and (missing := missing_tools()):
        raise UserError(
            f"DeepSpeed compiles a part of itself at the first start on CPUs, but this machine has no "
            f"{' and no '.join(missing)}; on Debian: apt install g++ ninja-build python3-dev"
        )


def take_own_ninja() -> None:
    """Put the folder of this Python, where pip installs ninja, first on the PATH.

    torch looks for ninja on the PATH, and compiles the extension of DeepSpeed again whenever it finds a different one.
    """
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]


def is_built() -> bool:
    """Return whether the CPU extension is in the cache: ``TORCH_EXTENSIONS_DIR``, else ``~/.cache/torch_extensions``."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return any(root.glob("**/deepspeed_shm_comm/*.so"))


def missing_tools() -> list[str]:
    """Return the names of the tools that are missing to compile it."""
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # pip installs ninja beside Python
    missing = [program for program in (os.environ.get("CXX", "g++"), "ninja") if not shutil.which(program, path=path)]
    # The Python of the operating system often comes without its headers.
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        missing.append("Python.h")
    return missing
