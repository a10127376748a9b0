"""Accelerators that this machine does not have: what matters is which one a process asks for."""

import os
import sys
from typing import Any

import torch

from workshop.check.probes.devices import device_index


def pretend_devices(count: int) -> None:
    """Let this machine seem to have so many accelerators, which are the CPU."""
    library = os.path.dirname(torch.__file__)

    def check(device: object) -> None:
        index = device_index(device)
        if index is not None and not 0 <= index < count:
            raise RuntimeError(f"invalid device ordinal: device {index} of {count}")

    def pretend(module: Any, name: str, value: object) -> None:
        """Tell the program the value, and torch itself the truth."""
        original = getattr(module, name)

        def answer(*args: Any, **kwargs: Any) -> Any:
            inside = sys._getframe(1).f_code.co_filename.startswith(library)
            return original(*args, **kwargs) if inside else value

        setattr(module, name, answer)

    accelerator: Any = torch.accelerator
    cuda: Any = torch.cuda
    for module in (accelerator, cuda):
        pretend(module, "is_available", True)
        pretend(module, "device_count", count)
    pretend(accelerator, "current_accelerator", torch.device("cpu"))
    accelerator.set_device_index = accelerator.set_device_idx = cuda.set_device = check
    accelerator.synchronize = cuda.synchronize = lambda *_: None
    accelerator.current_device_index = cuda.current_device = lambda: int(os.environ["LOCAL_RANK"])
