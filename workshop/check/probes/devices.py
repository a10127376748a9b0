"""How a process uses its device: which one it chooses, how often it waits for it, and whether it compiles code."""

import sys
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workshop.check.evidence.events import Compiled, DeviceChosen, ValuesAsked
from workshop.check.probes.probe import Function, Probe, around, before, on


def device_index(device: Any) -> int | None:
    """Return the index of a device in any form that torch accepts; None if it has none."""
    return device if isinstance(device, int) else torch.device(device).index


class Devices(Probe):
    """Records the device that a process sets."""

    writes = (DeviceChosen,)

    @before(torch.accelerator, "set_device_index", "set_device_idx")
    @before(torch.cuda, "set_device")
    def _set(self, device: object, *args: object, **kwargs: object) -> None:
        self.note_here(DeviceChosen(index=device_index(device)))


class HostSync(Probe):
    """Counts how often the program reads the value of a tensor, because it waits for the device each time."""

    writes = (ValuesAsked,)

    def clear(self) -> None:
        self.count, self.last = 0, ""

    @before(torch.Tensor, "item", "tolist", "__float__", "__int__", "__bool__", "numpy")
    def _ask(self, *args: Any, **kwargs: Any) -> None:
        # Frame 1 is the replacement of the function, frame 2 its caller: the program or a library.
        if not self.recorder.quiet and self.recorder.own(sys._getframe(2).f_code.co_filename):
            self.count, self.last = self.count + 1, self.recorder.where()

    @on("after_step")
    def _note(self, optimizer: Optimizer) -> None:
        self.recorder.note(ValuesAsked(count=self.count, where=self.last))


class Compiling(Probe):
    """Records ``torch.compile`` and ``Module.compile``, but does not compile, which would take half a minute."""

    writes = (Compiled,)

    @around(torch.autograd.profiler.profile, "__init__")
    def _profile(self, original: Function, profile: Any, *args: Any, **kwargs: Any) -> Any:
        # The profiler would end the process while it looks at the stack, in which there are functions of the check.
        return original(profile, *args, **kwargs | {"with_stack": False})

    @around(nn.Module, "compile")
    def _compile_module(self, *args: Any, **kwargs: Any) -> None:
        self.recorder.note(Compiled())

    @around(torch, "compile")
    def _compile(self, original: Function, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.recorder.note(Compiled())
        return (lambda function: function) if model is None else model  # without a model it is a decorator
