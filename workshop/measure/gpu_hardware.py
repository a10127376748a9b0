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
    """Return the machine, what is to be known about its first GPU, and the versions of CUDA or ROCm, NCCL and the driver.

    ``gpu_memory`` is in bytes, and ``peak_flops`` in FLOP/s. ``float8``: whether the GPU multiplies matrices in float8.
    """
    found = {"machine": machine(), "gpu_memory": 0, "float8": False, "peak_flops": None, "nccl": None}
    if torch.cuda.is_available():
        found["gpu_memory"] = gpu_memory(0)
        # Matrix products in float8: NVIDIA's Ada and Hopper, AMD's MI300 (gfx942), and later ones.
        found["float8"] = torch.cuda.get_device_capability(0) >= ((9, 4) if torch.version.hip else (8, 9))
        if peak := peak_flops(torch.device("cuda", 0)):
            found["peak_flops"] = peak[0]
        with suppress(AttributeError, RuntimeError):  # a build of PyTorch without NCCL
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found |= {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    found["driver"] = DRIVER.read_text().splitlines()[0] if DRIVER.is_file() else None
    return found


if __name__ == "__main__":
    print(json.dumps(hardware()))
