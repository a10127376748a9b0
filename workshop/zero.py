"""What stage 05's scripts share that is not the lesson: the check of DeepSpeed's configuration before anything is written."""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

from workshop.arguments import check_arguments, require_writable
from workshop.errors import UserError

# DeepSpeed passes over top-level keys that it does not know. These are the ones of its documentation:
# https://www.deepspeed.ai/docs/config-json/
KEYS = frozenset(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler communication_data_type
    seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor sparse_gradients fp16 bf16 amp
    torch_autocast gradient_clipping zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print
    wall_clock_breakdown dump_state memory_breakdown autotuning flops_profiler activation_checkpointing aio sparse_attention
    data_efficiency curriculum_learning tensorboard wandb comet csv_monitor comms_logger compression_training checkpoint
    data_types compile elasticity nebula hybrid_engine eigenvalue progressive_layer_drop data_parallel tensor_parallel
    disable_allgather use_node_local_storage timers""".split()  # noqa: SIM905 - a long list of names reads better so
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
    import torch

    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", 1))
    if not torch.accelerator.is_available() or torch.accelerator.device_count() < local_world_size:
        os.environ["DS_ACCELERATOR"] = "cpu"


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
        config = read_config(args.config)
        config["train_micro_batch_size_per_gpu"] = args.batch_size
        check_config(config, args.config, world_size)
        check_compiler()
        for option in ("folder", "export"):
            if value := getattr(args, option):
                require_writable(
                    f"--{option} {value}", Path(value) if option == "folder" else Path(value).absolute().parent
                )
    except UserError as error:
        parser.error(error)
    args.accumulate = config.get("gradient_accumulation_steps", 1)
    check_arguments(parser, args, world_size=world_size)
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
        world_size: the number of processes.
    """
    import torch
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    if unknown := sorted(config.keys() - KEYS):
        raise UserError(f"--config {path}: DeepSpeed knows no key {unknown[0]!r}, and would pass over it")
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise UserError(f'--config {path}: "zero_optimization" is a JSON object, {{"stage": 1}}')
    fields = DeepSpeedZeroConfig.model_fields
    names = {name for name, field in fields.items()} | {field.alias for field in fields.values() if field.alias}
    if unknown := sorted(zero.keys() - names):
        raise UserError(f'--config {path}: "zero_optimization" has no key {unknown[0]!r}')
    if (stage := zero.get("stage", 0)) not in (0, 1, 2, 3):
        raise UserError(f'--config {path}: "stage" of "zero_optimization" is 0, 1, 2 or 3, not {stage!r}')
    micro, accumulate = config["train_micro_batch_size_per_gpu"], config.get("gradient_accumulation_steps", 1)
    whole = config.get("train_batch_size", micro * accumulate * world_size)
    if world_size and whole != micro * accumulate * world_size:
        raise UserError(
            f'--config {path}: "train_batch_size" is {whole}, but {micro} samples x {accumulate} batches x {world_size} '
            f"processes are {micro * accumulate * world_size}; leave the key out"
        )
    if config.get("fp16", {}).get("enabled") and not torch.accelerator.is_available():
        raise UserError(f'--config {path}: "fp16" needs a GPU; take "bf16", which CPUs compute with too')


def check_compiler() -> None:
    """Raise a UserError if DeepSpeed could not build its extension for the CPU, which it does at the first start."""
    import torch

    if not torch.accelerator.is_available() and not is_built() and (missing := missing_tools()):
        raise UserError(
            f"DeepSpeed compiles a part of itself at the first start on CPUs, and there is no {' and no '.join(missing)} here; "
            "on Debian: apt install g++ ninja-build"
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
    return [program for program in (os.environ.get("CXX", "g++"), "ninja") if not shutil.which(program, path=path)]
