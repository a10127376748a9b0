"""The kinds of optimizers, their settings, and the backward passes whose gradients they use."""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer

from workshop.check.evidence.misuses import GradientsMixed, InHalfPrecision, OptimizerSeen
from workshop.check.probes.contents import is_zero
from workshop.check.probes.probe import Probe, on

# Settings that schedules change, and those that change only how the optimizer computes.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
SCHEDULED = ("betas", "momentum", "base_momentum", "max_momentum")
OTHER = ("params", "foreach", "fused", "capturable", "differentiable")
MIXED = 2  # steps with gradients of two losses that show that they are not cleared


class Optimizers(Probe):
    """Records each optimizer before its first step."""

    writes = (OptimizerSeen, InHalfPrecision)

    def clear(self) -> None:
        self.seen: WeakSet[Optimizer] = WeakSet()

    @on("before_step")
    def _step(self, optimizer: Any) -> None:
        if optimizer in self.seen:
            return
        self.seen.add(optimizer)
        group = optimizer.param_groups[0]
        without = (*OTHER, *RATES, *(SCHEDULED if "initial_lr" in group else ()))  # a schedule sets initial_lr
        settings = {name: f"{value}" for name, value in group.items() if name not in without}
        rate = float(group.get("initial_lr", group.get("lr", 0)))
        made = self.recorder.optimizers.get(optimizer, "")
        self.recorder.note(OptimizerSeen(kind=type(optimizer).__name__, rate=rate, settings=settings, where=made))
        parameters = _parameters(optimizer)
        for dtype in (torch.bfloat16, torch.float16):
            # Optimizers of other libraries may keep what rounding loses.
            if type(optimizer).__module__.startswith("torch.") and (
                places := [number for number, each in enumerate(parameters) if each.dtype is dtype]
            ):
                name = str(dtype).removeprefix("torch.")
                self.recorder.note(InHalfPrecision(dtype=name, places=places, where=made))


@dataclass(eq=False)
class _Pass:
    """A backward pass: for which optimizers it computed gradients, and which of them have used these in a step."""

    where: str
    of: set[int]
    begun: int = 0  # the number of steps before it
    used: dict[int, int] = field(default_factory=dict)  # the number of steps before that of such an optimizer


class TwoOptimizers(Probe):
    """Records steps of one optimizer with gradients that the backward pass for another one has left in its parameters."""

    writes = (GradientsMixed,)

    def clear(self) -> None:
        self.passes: WeakKeyDictionary[Optimizer, list[_Pass]] = WeakKeyDictionary()  # since the gradients were cleared
        self.before: dict[int, list[tuple[int, int]]] = {}  # the state of the gradients before a backward pass
        self.mixed = self.taken = 0

    @on("before_backward")
    def _begin(self, loss: Any) -> None:
        self.before = {}
        if len(self.recorder.optimizers) > 1 and self.mixed < MIXED:
            for optimizer in list(self.recorder.optimizers):
                self._cleared(optimizer)
                self.before[id(optimizer)] = _versions(optimizer)

    @on("after_backward")
    def _end(self) -> None:
        known = [each for each in self.recorder.optimizers if id(each) in self.before]
        changed = [each for each in known if self.before[id(each)] != _versions(each)]
        if not changed:
            return
        for_them = _Pass(self.recorder.where(), set(map(id, changed)), self.taken)
        for optimizer in changed:
            self.passes.setdefault(optimizer, []).append(for_them)

    @on("before_step")
    def _step(self, optimizer: Any) -> None:
        self._cleared(optimizer)
        *earlier, last = self.passes.get(optimizer) or [_Pass("", set())]
        # The other optimizer took its step before the last pass, which computed no gradients for it.
        left = [
            each
            for each in earlier
            if any(taken < last.begun and other in each.of - last.of for other, taken in each.used.items())
        ]
        for each in (*earlier, last):
            each.used[id(optimizer)] = self.taken
        self.taken += 1
        self.mixed += bool(left)
        if left and self.mixed == MIXED:
            names = [self.recorder.names.get(id(each), "") for each in _parameters(optimizer)]
            names = [name for name in names if name][:3]
            # The gradients must be cleared between these two passes.
            own = (*earlier, last)[earlier.index(left[-1]) + 1]
            self.recorder.note(GradientsMixed(names=names, other=left[-1].where, where=own.where))

    def _cleared(self, optimizer: Optimizer) -> None:
        if all(is_zero(each.grad) for each in _some(optimizer)):
            self.passes.pop(optimizer, None)


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _some(optimizer: Optimizer) -> list[Any]:
    """The first and the last parameter of each group."""
    return [each for group in optimizer.param_groups for each in (*group["params"][:1], *group["params"][-1:])]


def _versions(optimizer: Optimizer) -> list[tuple[int, int]]:
    """What is different after a backward pass that has added to the gradients."""
    gradients = [each.grad for each in _some(optimizer)]
    return [(id(each), each._version) if each is not None else (0, 0) for each in gradients]
