"""What stage 05's scripts share that is not the lesson: the check of DeepSpeed's configuration before anything is written."""

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

# The blocks of the configuration whose names deepspeed.runtime.config has not as constants: other modules read them.
BLOCKS = frozenset(
    """zero_optimization activation_checkpointing aio amp autotuning comet comms_logger compile csv_monitor flops_profiler
    hybrid_engine pipeline tensor_parallel tensorboard timers wandb""".split()  # noqa: SIM905 - a list of names reads better so
)


def require_deepspeed() -> None:
    """End the program with one line and exit status 2 if DeepSpeed is not installed. Call it before ``import deepspeed``.

    DeepSpeed chooses the kind of device when it is imported. Where not each process of this machine gets a GPU of its own, this
    lets it choose the CPU, as the scripts do.
    """
    if not importlib.util.find_spec("deepspeed"):
        print(
            "DeepSpeed is not installed here, an extra: pip install -e '.[deepspeed]' in the workshop's folder",
            file=sys.stderr,
        )
        sys.exit(2)
    take_own_ninja()
    # It would say in each process that a CUDA compiler is there, and no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if gpus() < int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", 1)):
        os.environ["DS_ACCELERATOR"] = "cpu"


def check_gathering() -> None:
    """Raise a UserError where ZeRO-3 would compute with weights that have not arrived.

    After a step DeepSpeed gathers the small weights, each by an all-gather of its own, and before 0.19.8 waited for the last one
    alone. A GPU runs them in order; gloo does not: https://github.com/deepspeedai/DeepSpeed/pull/8539
    """
    from packaging.version import Version

    version = importlib.metadata.version("deepspeed")
    if os.environ.get("DS_ACCELERATOR") == "cpu" and Version(version) < Version("0.19.8"):
        raise UserError(
            f"DeepSpeed {version}: on CPUs its ZeRO-3 does not wait for all weights, and trains with what lies in memory; "
            "take DeepSpeed 0.19.8 or newer"
        )


def check_zero(parser, args) -> dict:
    """End the run with one line and exit status 2 where ``args`` cannot work; return DeepSpeed's configuration where they can.

    Args:
        parser: the script's parser; its ``error`` is how the run ends.
        args: the options ``config`` (a file), ``batch_size`` (samples a step on each process, which replaces the file's),
            ``dataset``, ``folder`` and ``export``.

    Returns:
        What the file says, with ``train_micro_batch_size_per_gpu`` of ``args.batch_size``.
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
    """DeepSpeed's configuration from a file, with ``batch_size`` samples a step on each process.

    Raises:
        UserError: it cannot be read, does not fit ``world_size`` processes, or DeepSpeed cannot start here.
    """
    config = read_config(path)
    config["train_micro_batch_size_per_gpu"] = batch_size
    check_config(config, path, world_size)
    check_compiler()
    return config


def read_config(path: str) -> dict:
    """DeepSpeed's configuration from a file of JSON.

    Raises:
        UserError: it cannot be read, or is no JSON object.
    """
    try:
        config = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--config {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"--config {path}: DeepSpeed's configuration is a JSON object, {{...}}")
    return config


def check_config(config: dict, path: str, world_size: int) -> None:
    """Raise a UserError, which names the key, where DeepSpeed would stop, or pass over what was meant.

    Args:
        config: the configuration.
        path: the file it is from.
        world_size: the number of processes; 0 if it is not known.
    """
    import torch
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def refuse(what: str):
        raise UserError(f"--config {path}: {what}")

    if unknown := sorted(config.keys() - known_keys()):
        refuse(f"DeepSpeed knows no key {unknown[0]!r}, and would pass over it")
    for block in ("zero_optimization", "fp16", "bf16"):
        if not isinstance(config.get(block, {}), dict):
            refuse(f'"{block}" is a JSON object, {{...}}, not {json.dumps(config[block])}')
    zero = config.get("zero_optimization", {})
    fields = DeepSpeedZeroConfig.model_fields
    names = {name for name, field in fields.items()} | {field.alias for field in fields.values() if field.alias}
    if unknown := sorted(zero.keys() - names):
        refuse(f'"zero_optimization" has no key {unknown[0]!r}')
    if (stage := zero.get("stage", 0)) not in (0, 1, 2, 3):
        refuse(f'"stage" of "zero_optimization" is 0, 1, 2 or 3, not {stage!r}')
    if stage == 3:
        check_gathering()
    for key in ("gradient_accumulation_steps", "train_batch_size"):
        if key in config and not (type(config[key]) is int and config[key] > 0):
            refuse(f'"{key}" is a whole number of at least 1, not {json.dumps(config[key])}')
    micro, accumulate = config["train_micro_batch_size_per_gpu"], config.get("gradient_accumulation_steps", 1)
    whole = config.get("train_batch_size", micro * accumulate * world_size)
    if world_size and whole != micro * accumulate * world_size:
        refuse(
            f'"train_batch_size" is {whole}, but {micro} samples x {accumulate} batches x {world_size} '
            f"processes are {micro * accumulate * world_size}; leave the key out"
        )
    if config.get("fp16", {}).get("enabled") and not torch.accelerator.is_available():
        refuse('"fp16" needs a GPU; take "bf16", which CPUs compute with too')


def known_keys() -> set[str]:
    """The top-level keys that the installed DeepSpeed reads; it passes over any other.

    They are the values of the constants of ``deepspeed.runtime.config``, and ``BLOCKS``. (A few too many: the module has
    constants for values and for keys within blocks as well.)
    """
    from deepspeed.runtime import config

    constants = {value for name, value in vars(config).items() if name.isupper() and isinstance(value, str)}
    return constants | BLOCKS


def check_checkpoint(config: dict, folder: Path, world_size: int) -> None:
    """Raise a UserError if the checkpoint in a folder is of another number of processes, or was spread in another way.

    Args:
        config: the configuration.
        folder: the folder of the checkpoints; it need not exist.
        world_size: the number of processes; 0 if it is not known.
    """
    latest = folder / "latest"
    if not latest.is_file():
        return
    place = folder / latest.read_text().strip()
    parts = len(list(place.glob("*zero_pp_rank_*_optim_states.pt")))  # ZeRO's, one of each process
    spread = bool(list(place.glob("*zero_pp_rank_*_model_states.pt")))  # the weights too: ZeRO-3
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if parts and world_size and parts != world_size:
        raise UserError(
            f"--folder {folder} holds a checkpoint of {parts} process{'es' * (parts > 1)}, which {world_size} cannot load; start "
            f"{parts}, or name another folder ({folder}/zero_to_fp32.py puts the weights together)"
        )
    if bool(parts) != (stage > 0) or spread != (stage == 3):
        was = "3" if spread else "1 or 2" if parts else "0"
        raise UserError(
            f"--folder {folder} holds a checkpoint of ZeRO's stage {was}, which stage {stage} cannot load; take that stage, or "
            "name another folder"
        )


def check_compiler() -> None:
    """Raise a UserError if DeepSpeed could not build its extension for the CPU, which it does at the first start."""
    import torch

    if not torch.accelerator.is_available() and not is_built() and (missing := missing_tools()):
        raise UserError(
            f"DeepSpeed compiles a part of itself at the first start on CPUs, and there is no {' and no '.join(missing)} here; "
            "on Debian: apt install g++ ninja-build python3-dev"
        )


def take_own_ninja() -> None:
    """Put the folder where pip puts ninja, beside this Python, first on the PATH.

    torch looks for ninja there; and DeepSpeed's extension is compiled anew whenever another one comes first.
    """
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]


def is_built() -> bool:
    """Whether DeepSpeed's extension for CPUs is in the cache: ``TORCH_EXTENSIONS_DIR``, else ``~/.cache/torch_extensions``."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return any(root.glob("**/deepspeed_shm_comm/*.so"))


def missing_tools() -> list[str]:
    """What is missing to compile it."""
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # pip puts ninja beside Python
    missing = [program for program in (os.environ.get("CXX", "g++"), "ninja") if not shutil.which(program, path=path)]
    # A system's Python often comes without its headers.
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        missing.append("Python.h")
    return missing
