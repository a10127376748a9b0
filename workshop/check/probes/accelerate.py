"""Accelerate: calls of methods of the Accelerator."""

from typing import Any

import torch

from workshop.check.evidence.events import AcceleratorCalled
from workshop.check.probes.probe import Probe, before

METHODS = ("prepare", "backward", "gather_for_metrics", "save_state", "load_state")


class Accelerators(Probe):
    """Records calls of ``Accelerator`` methods."""

    writes = (AcceleratorCalled,)
    library = "accelerate"

    @before(lambda accelerate: accelerate.Accelerator, *METHODS, named=True)
    def _call(self, name: str, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        of = [_kind(arg) for arg in args]
        rest = 0
        if name == "gather_for_metrics" and not torch.is_grad_enabled() and _numbers([*args, *kwargs.values()]):
            rest = max(0, accelerator.gradient_state.remainder)
        self.note_here(AcceleratorCalled(name=name, of=of, rest=rest))

    @before(lambda accelerate: accelerate.Accelerator, "gather")
    def _gather(self, *args: Any, **kwargs: Any) -> None:
        if not torch.is_grad_enabled() and self.recorder.called_by_program():
            self.note_here(AcceleratorCalled(name="gather"))


def _kind(argument: Any) -> str:
    if isinstance(argument, torch.optim.Optimizer):
        return "Optimizer"
    return type(getattr(argument, "sampler", argument)).__name__


def _numbers(values: Any) -> bool:
    """Whether nested arguments contain tensors with one floating point number each, such as means, and no other tensors."""
    parts = list(values.values()) if isinstance(values, dict) else values
    if isinstance(parts, torch.Tensor):
        return bool(parts.dim() == 0 and parts.is_floating_point())
    return isinstance(parts, (list, tuple)) and bool(parts) and all(map(_numbers, parts))
