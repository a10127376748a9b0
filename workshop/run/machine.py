"""Describe the machine that a program runs on: its cores and GPUs, and what to record with a measurement."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from workshop.repository import python_path


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """Return the number of accelerators that this process sees."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def gpus_unopened() -> int:
    """Return the number of accelerators that this process would see, without opening them in this process.

    A process that has counted its GPUs cannot fork programs that use them, and the kernel of a notebook would keep memory on
    them. So a new process counts them, and only if the device file of a GPU exists.
    """
    files = ("nvidia[0-9]*", "kfd", "dxg", "dri")
    if sys.platform == "linux" and not any(next(Path("/dev").glob(name), None) for name in files):
        return 0
    command = [sys.executable, "-P", "-c", "from workshop.run.machine import gpus; print(gpus())"]
    variables = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    return int(done.stdout.strip() or 0)


def machine() -> dict[str, object]:
    """Return the machine and the versions that a measurement was made with."""
    import psutil
    import torch

    processor = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists() and (
        match := re.search(r"model name\s*: (.*)", cpuinfo.read_text())
    ):
        processor = match[1]
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": processor,
        "cores": cores(),
        "memory": psutil.virtual_memory().total,
        "gpus": devices,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
