"""``workshop diagnose --pid``: look once at the processes of this machine."""

from __future__ import annotations

from pathlib import Path

import psutil

from workshop.diagnose.causes import judge
from workshop.diagnose.collect import collect
from workshop.diagnose.report import show
from workshop.errors import UserError
from workshop.run.processes import family


def diagnose_process(pid: int, output: str = "") -> int:
    """Report what a process and its descendants do.

    Args:
        pid: the launcher, or one rank: then the other ranks of its launcher count too.
        output: the folder of the report.

    Returns:
        0: it makes progress; 1: it hangs.

    Raises:
        UserError: there is no such process, or it belongs to a different user.
    """
    try:
        process = psutil.Process(pid)
        environment = process.environ()
        parent = process.parent()
        if "LOCAL_RANK" in environment and parent and "LOCAL_RANK" not in parent.environ():
            process = parent  # a rank of torchrun
    except psutil.NoSuchProcess:
        raise UserError(f"there is no process {pid}: it has ended, or it runs on a different node") from None
    except psutil.AccessDenied:
        raise UserError(
            f"process {pid} belongs to a different user ({process.username()}), so it cannot be read"
        ) from None
    folder = environment.get("WORKSHOP_DIAGNOSE", "")
    scene, _ = collect(lambda: family(process.pid), Path(folder) if folder and Path(folder).is_dir() else None)
    diagnosis = judge(scene)
    show(diagnosis, scene, output, f"process {pid}")
    return 0 if diagnosis.cause in ("moves", "slow") else 1
