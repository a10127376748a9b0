"""Learning-rate schedules: for how many steps they are made, and how many they take."""

from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from workshop.check.evidence.events import ScheduleSeen
from workshop.check.probes.probe import Probe, after, on

MOST = 16  # schedules that are recorded; each keeps its optimizer in memory
FARTHEST = 20  # times the steps that were taken: how far the end of a schedule is looked for
END = 0.01  # of the highest rate: a schedule ends when it falls below
# The attribute with the length of a schedule.
LENGTHS = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps", "PolynomialLR": "total_iters"}


class Schedules(Probe):
    """Records each schedule of the program at its end."""

    writes = (ScheduleSeen,)

    def clear(self) -> None:
        self.made: list[tuple[Any, str]] = []  # each schedule, and the line that created it

    @after(LRScheduler, "__init__")
    def _remember(self, result: None, schedule: Any, *args: Any, **kwargs: Any) -> None:
        if len(self.made) < MOST:
            self.made.append((schedule, self.recorder.where()))

    @on("at_end")
    def _note(self) -> None:
        for schedule, where in self.made:
            taken = int(schedule.last_epoch)
            length = _length(schedule, taken)
            if length and taken > 1:
                self.recorder.note(ScheduleSeen(taken=taken, length=length, where=where))


def _length(schedule: Any, taken: int) -> int | None:
    """The number of steps until a schedule ends; None if it has no end."""
    if name := LENGTHS.get(type(schedule).__name__):
        return int(getattr(schedule, name))
    if type(schedule) is not lr_scheduler.LambdaLR:
        return None
    rate = schedule.lr_lambdas[0]
    values = [float(rate(step)) for step in range(FARTHEST * taken)]
    top = values.index(max(values))
    return next((step for step, value in enumerate(values) if step > top and value <= END * values[top]), None)
