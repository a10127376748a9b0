"""A process's device, its time and its memory, and what its collectives send."""

import os
import resource
import sys
import time

import torch

import workshop.run.process_group  # noqa: F401
from workshop.run.machine import gpus

# Bus bandwidth over algorithm bandwidth, for n processes: how often each byte of the buffer crosses a link.
BUS_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
}


def local_device() -> torch.device:
    """The device of a process that torchrun has started: the accelerator of its local rank, or the CPU if not each has one."""
    if gpus() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    return torch.accelerator.current_accelerator()


def synchronized_time(device: torch.device) -> float:
    """The time in seconds (of ``time.perf_counter``), once the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """The most memory that this process has had, in bytes: in tensors on an accelerator, in all on the CPU."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gpu_memory(index: int) -> int:
    """The memory of an accelerator, in bytes."""
    return torch.get_device_module(torch.accelerator.current_accelerator()).mem_get_info(index)[1]
