"""The machine that a figure was measured on."""

import platform
import re
from pathlib import Path


def machine() -> dict:
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
        "cores": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else psutil.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "gpus": devices,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
