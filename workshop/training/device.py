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
    """Return the device of this process: the visible GPU with its local rank, or the CPU on a machine without a GPU."""
    if not gpus():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_index())
    return torch.accelerator.current_accelerator()


def local_index() -> int:
    """Return the index of the GPU of this process. If the job shows each process only its own GPU, the index is 0.

    Without a launcher, the local rank is 0.
    """
    return int(os.environ.get("LOCAL_RANK", 0)) % gpus()


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
