"""Tell the lines of a program from those of libraries, and find the processes of its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

import psutil

from workshop.diagnose.evidence import Place

# "<frozen runpy>" and the like are Python's own; "<string>" is a program after "python -c".
LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|^<frozen|^<built|sitecustomize\.py$|/bin/torchrun$"
)
SETTINGS: tuple[str, ...] = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
SETTINGS += (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "SLURM_PROCID",
    "SLURM_JOB_ID",
    "SLURM_NNODES",
    "SLURMD_NODENAME",
)
SETTINGS += ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "CUDA_VISIBLE_DEVICES")
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def own_place(frames: Iterable[Place]) -> Place | None:
    """Return the first line of ``frames``, innermost first, that belongs to the program and not to a library."""
    return next((frame for frame in frames if not LIBRARY.search(frame.file)), None)


def settings_of(process: psutil.Process) -> dict[str, str]:
    """Return the variables of a process that matter here; empty if they cannot be read."""
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return {}
    return {name: environment[name] for name in SETTINGS if name in environment}


def is_python(process: psutil.Process) -> bool:
    """Return whether a process is a Python interpreter, and neither a helper of multiprocessing nor ``workshop diagnose``."""
    with suppress(psutil.Error, OSError):
        words = process.cmdline()
        other = (
            any("resource_tracker" in word or "semaphore_tracker" in word for word in words) or "diagnose" in words[:5]
        )
        return bool(words) and "python" in os.path.basename(process.exe()) and not other
    return False


def rank_of(settings: dict[str, str]) -> int:
    """Return the rank that the variables of a process say; -1: none."""
    for name in RANKS:
        if settings.get(name, "").isdigit():
            return int(settings[name])
    return -1


def find_ranks(members: Sequence[psutil.Process], known: Iterable[int] = ()) -> dict[int, psutil.Process]:
    """Return the main process of each rank, by process ID.

    Only torchrun, srun and mpirun give a process its rank as a variable. The children of a rank have the same variables, so the
    process whose parent has a different rank is the main process.

    Args:
        members: the processes of the program.
        known: process IDs that said themselves that they are ranks.
    """
    pythons = {member.pid: member for member in members if is_python(member)}
    settings = {pid: settings_of(member) for pid, member in pythons.items()}
    found = {pid: pythons[pid] for pid in known if pid in pythons}
    for pid, member in pythons.items():
        rank = rank_of(settings[pid])
        with suppress(psutil.Error):
            parent = member.ppid()
            if (
                rank >= 0
                and not is_launcher(member)
                and (rank_of(settings.get(parent, {})) != rank or _launches(pythons, parent))
            ):
                found.setdefault(pid, member)
    if found:
        # A worker that was forked has inherited everything, also the process group.
        return {pid: member for pid, member in found.items() if not _is_child(member, found)}
    return _without_variables(pythons)


def _is_child(process: psutil.Process, of: Iterable[int]) -> bool:
    with suppress(psutil.Error):
        return any(parent.pid in of for parent in process.parents())
    return True


def is_launcher(process: psutil.Process) -> bool:
    """Return whether a process is torchrun."""
    with suppress(psutil.Error):
        words = process.cmdline()[:6]
        return any(word.endswith(("/torchrun", "torch.distributed.run", "torch.distributed.launch")) for word in words)
    return False


def _launches(pythons: dict[int, psutil.Process], pid: int) -> bool:
    return pid in pythons and is_launcher(pythons[pid])


def _without_variables(pythons: dict[int, psutil.Process]) -> dict[int, psutil.Process]:
    """Return the processes that mp.spawn started; a program of one process is its only rank."""
    spawned = {}
    for pid, member in pythons.items():
        with suppress(psutil.Error):
            if any("spawn_main" in word for word in member.cmdline()) and member.ppid() in pythons:
                spawned[pid] = member
    # A DataLoader worker that was spawned has a spawned parent.
    top = {}
    for pid, member in spawned.items():
        with suppress(psutil.Error):
            if member.ppid() not in spawned:
                top[pid] = member
    return top or dict(list(pythons.items())[:1])
