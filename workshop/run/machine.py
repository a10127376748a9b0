"""The machine that a program runs on: its cores and GPUs, and what to write beside a figure that was measured on it."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from workshop.repository import python_path


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """The number of accelerators that this process sees."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def gpus_unopened() -> int:
    """The number of accelerators that this process would see, without opening them in this process.

    A process that has counted its GPUs cannot fork programs that use them, and a notebook's kernel would keep memory on them.
    So another process counts, and only where a GPU's device file exists.
    """
    files = ("nvidia[0-9]*", "kfd", "dxg", "dri")
    if sys.platform == "linux" and not any(next(Path("/dev").glob(name), None) for name in files):
        return 0
    command = [sys.executable, "-P", "-c", "from workshop.run.machine import gpus; print(gpus())"]
    variables = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    return int(done.stdout.strip() or 0)


def machine() -> dict[str, object]:
    """The machine and versions that a figure was measured with."""
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
