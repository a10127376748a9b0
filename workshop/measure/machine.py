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


def bf16_is_fast(device) -> bool:
    """Whether a ``torch.device`` computes in bfloat16 faster than in float32, for all that it says of itself.

    On a CPU the instructions have to be there (avx512_bf16, amx_bf16, ARM's bf16); without them bfloat16 is emulated, and slower.
    """
    import torch

    if device.type == "cuda":  # ROCm too
        return torch.cuda.is_bf16_supported(including_emulation=False)
    cpuinfo = Path("/proc/cpuinfo")
    if device.type != "cpu" or not cpuinfo.exists():
        return False
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", cpuinfo.read_text()) is not None
