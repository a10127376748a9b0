"""Accelerate: calls of methods of the Accelerator."""

from typing import Any

import torch

from workshop.check.evidence.events import AcceleratorCalled
from workshop.check.evidence.misuses import ScheduleAdvanced
from workshop.check.probes.probe import Function, Probe, around, before, on

METHODS = ("prepare", "backward", "gather_for_metrics", "save_state", "load_state")


class Accelerators(Probe):
    """Records calls of ``Accelerator`` methods."""

    writes = (AcceleratorCalled, ScheduleAdvanced)
    library = "accelerate"

    def clear(self) -> None:
        self.advanced: dict[
            int, tuple[Any, int, str]
        ] = {}  # each prepared schedule, the calls of its step(), and their line

    @before(lambda accelerate: accelerate.Accelerator, *METHODS, named=True)
    def _call(self, name: str, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        of = [_kind(arg) for arg in args]
        rest = 0
        values = [*args, *kwargs.values()]
        if name == "gather_for_metrics" and not torch.is_grad_enabled() and _numbers(values):
            rest = max(0, accelerator.gradient_state.remainder)
            if rest <= accelerator.num_processes and not _numbers(values, 0):
                rest = 0  # each process may have batches of one sample
        self.note_here(AcceleratorCalled(name=name, of=of, rest=rest))

    @before(lambda accelerate: accelerate.Accelerator, "gather")
    def _gather(self, *args: Any, **kwargs: Any) -> None:
        if not torch.is_grad_enabled() and self.recorder.called_by_program():
            self.note_here(AcceleratorCalled(name="gather"))

    @around(lambda accelerate: accelerate.scheduler.AcceleratedScheduler, "step")
    def _step(self, original: Function, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.guard:
            _, calls, where = self.advanced.get(id(schedule), (schedule, 0, ""))
            self.advanced[id(schedule)] = schedule, calls + 1, where or self.recorder.where()
        return original(schedule, *args, **kwargs)

    @on("at_end")
    def _end(self) -> None:
        for schedule, calls, where in self.advanced.values():
            inner, taken = schedule.scheduler, int(schedule.scheduler.last_epoch)
            self.recorder.note(ScheduleAdvanced(kind=type(inner).__name__, calls=calls, taken=taken, where=where))


def _kind(argument: Any) -> str:
    if isinstance(argument, torch.optim.Optimizer):
        return "Optimizer"
    return type(getattr(argument, "sampler", argument)).__name__


def _numbers(values: Any, dimensions: int = 1) -> bool:
    """Whether nested arguments contain a tensor with one floating point number, such as a mean, of at most these dimensions."""
    parts = list(values.values()) if isinstance(values, dict) else values
    if isinstance(parts, torch.Tensor):
        return bool(parts.dim() <= dimensions and parts.numel() == 1 and parts.is_floating_point())
    return isinstance(parts, (list, tuple)) and any(_numbers(each, dimensions) for each in parts)
