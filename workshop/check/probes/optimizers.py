"""The kinds of optimizers, and their settings."""

from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer

from workshop.check.evidence.misuses import OptimizerSeen
from workshop.check.probes.probe import Probe, on

# Settings that schedules change, and those that change only how the optimizer computes.
RATES = ("lr", "initial_lr", "max_lr", "min_lr")
SCHEDULED = ("betas", "momentum", "base_momentum", "max_momentum")
OTHER = ("params", "foreach", "fused", "capturable", "differentiable")


class Optimizers(Probe):
    """Records each optimizer before its first step."""

    writes = (OptimizerSeen,)

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
