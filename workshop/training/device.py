"""Choose the device of a process, and measure its time, its memory and what its collectives send."""

import os
import resource
import sys
import time

import torch

import workshop.run.process_group  # noqa: F401
from workshop.run.machine import gpus

# Bus bandwidth divided by algorithm bandwidth, for n processes: how often each byte of the buffer crosses a link.
BUS_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
}


def local_device() -> torch.device:
    """Return the device of a process that torchrun started: the accelerator of its local rank, or the CPU if too few."""
    if gpus() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    return torch.accelerator.current_accelerator()


def synchronized_time(device: torch.device) -> float:
    """Wait until the device has finished all its work, and return the time in seconds (of ``time.perf_counter``)."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process, in bytes: of its tensors on an accelerator, of the whole process on the CPU."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gpu_memory(index: int) -> int:
    """Return the memory of an accelerator, in bytes."""
    return torch.get_device_module(torch.accelerator.current_accelerator()).mem_get_info(index)[1]
