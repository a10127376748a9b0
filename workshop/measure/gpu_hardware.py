"""Print what to record about the GPUs of this machine, as JSON: ``python -m workshop.measure.gpu_hardware``."""

import json
from contextlib import suppress
from pathlib import Path

import torch

from workshop.run.machine import machine
from workshop.training.device import gpu_memory
from workshop.training.transformer import peak_flops

DRIVER = Path("/proc/driver/nvidia/version")


def hardware() -> dict:
    """Return the machine, memory and peak FLOP/s of a GPU, and the versions of CUDA or ROCm, NCCL and the driver."""
    found = {"machine": machine(), "gpu_memory": 0, "peak_flops": None, "nccl": None}
    if torch.cuda.is_available():
        found["gpu_memory"] = gpu_memory(0)
        if peak := peak_flops(torch.device("cuda", 0)):
            found["peak_flops"] = peak[0]
        with suppress(AttributeError, RuntimeError):  # a build of PyTorch without NCCL
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found |= {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    found["driver"] = DRIVER.read_text().splitlines()[0] if DRIVER.is_file() else None
    return found


if __name__ == "__main__":
    print(json.dumps(hardware()))
