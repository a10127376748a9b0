"""The environment and the launcher of a program that is started on this machine."""

import os
import sys
from collections.abc import Mapping

from workshop.repository import python_path


def torchrun(processes: int, *options: str) -> list[str]:
    """The command, up to the program, that starts so many processes of it on this machine, with this Python.

    ``--local-addr``: it would else ask for the address of this machine's name, and not every laptop can resolve its own.
    """
    return [
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *(f"--nproc-per-node={processes}", *options),
    ]


def environment(*, gpus: bool = True, **changes: object) -> dict[str, str]:
    """The environment of a program that we start: this process's, without the variables of a launcher or a job.

    ``PYTHONPATH`` begins with the repository, and ``WORKSHOP_PYTHON`` is this Python, so that runners use it too.

    Args:
        gpus: False hides the GPUs.
        changes: further variables, as text; None drops one.
    """
    variables: dict[str, object] = {**without_launcher(os.environ)}
    variables |= {"PYTHONPATH": python_path(), "WORKSHOP_PYTHON": sys.executable}
    if not gpus:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return {name: str(value) for name, value in (variables | changes).items() if value is not None}


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that a job, or a launcher of processes, sets for what it starts."""
    prefixes = ("SLURM_", "SBATCH_", "PBS_", "PALS_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "MASTER_")
    names = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NPROC"}
    return {name: value for name, value in environment.items() if not name.startswith(prefixes) and name not in names}


def for_scheduler(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for sbatch and qsub without the job that this session may itself be, and without its kernel's Python.

    A Jupyter session on a cluster is a small job: its variables would give the new job that size, and SLURM_EXPORT_ENV=NONE.
    """
    kept = {name: environment[name] for name in ("SBATCH_ACCOUNT", "SLURM_CONF") if name in environment}
    names = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "WORKSHOP_SITE"}
    names |= {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
    prefixes = ("SRUN_", "SALLOC_", "SLURMD_")
    rest = without_launcher(environment).items()
    return {name: value for name, value in rest if name not in names and not name.startswith(prefixes)} | kept


def loopback() -> str:
    """The network interface that a machine reaches itself by, for ``GLOO_SOCKET_IFNAME``."""
    return "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
