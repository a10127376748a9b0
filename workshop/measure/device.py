"""The time and the memory of a device."""

import resource
import sys
import time

import torch


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
