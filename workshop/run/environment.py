"""Build the environment and the launch command of a program that is started on this machine."""

import os
import socket
import sys
from collections.abc import Mapping

from workshop.repository import python_path


def torchrun(processes: int, *options: str) -> list[str]:
    """Return the torchrun command, without the program, that starts this number of processes on this machine.

    Without ``--local-addr``, torchrun would look up the host name of this machine, which some laptops cannot resolve.
    """
    return [
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *(f"--nproc-per-node={processes}", *options),
    ]


def environment(*, gpus: bool = True, **changes: object) -> dict[str, str]:
    """Return the environment of a program that we start: the current one, without the variables of a launcher or a job.

    ``PYTHONPATH`` begins with the repository, and ``WORKSHOP_PYTHON`` is this Python, so that runners use it too.

    Args:
        gpus: False hides the GPUs.
        changes: further variables, as text; None removes a variable.
    """
    variables: dict[str, object] = {**without_launcher(os.environ)}
    variables |= {"PYTHONPATH": python_path(), "WORKSHOP_PYTHON": sys.executable}
    if not gpus:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return {name: str(value) for name, value in (variables | changes).items() if value is not None}


def why_hidden(processes: int, gpus: int) -> str:
    """Return the line with which a tool says that it hides the GPUs from several processes; "": each process has a GPU.

    Two processes cannot train on one GPU, because NCCL refuses this. If there are fewer GPUs than processes, all of them use the
    CPU. A machine without a GPU needs no such line.
    """
    if gpus == 0 or gpus >= processes:
        return ""
    return (
        f"{processes} processes do not fit on {gpus} GPU{'s' * (gpus > 1)}, so the GPU{'s are' if gpus > 1 else ' is'} hidden "
        "and these processes run on the CPU"
    )


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that a job or a launcher sets for its processes."""
    prefixes = ("SLURM_", "SBATCH_", "PBS_", "PALS_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "MASTER_")
    names = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NPROC"}
    return {name: value for name, value in environment.items() if not name.startswith(prefixes) and name not in names}


def for_scheduler(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for sbatch and qsub, without the variables of the job and the Python of this session.

    A Jupyter session on a cluster is a small job. Its variables would give the new job its size, and SLURM_EXPORT_ENV=NONE.
    """
    kept = {name: environment[name] for name in ("SBATCH_ACCOUNT", "SLURM_CONF") if name in environment}
    names = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "WORKSHOP_SITE"}
    names |= {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
    prefixes = ("SRUN_", "SALLOC_", "SLURMD_")
    rest = without_launcher(environment).items()
    return {name: value for name, value in rest if name not in names and not name.startswith(prefixes)} | kept


def free_port() -> int:
    """Return a port of this machine that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def loopback() -> str:
    """Return the name of the loopback network interface, for ``GLOO_SOCKET_IFNAME``."""
    return "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
