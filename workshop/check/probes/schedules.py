"""Learning-rate schedules: for how many steps they are made, and how many they take."""

import ast
import linecache
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from workshop.check.evidence.events import ScheduleSeen
from workshop.check.evidence.misuses import PlateauSeen, ScheduleStepped
from workshop.check.probes.contents import mean
from workshop.check.probes.probe import Probe, after, before, on

MOST = 16  # schedules that are recorded; each keeps its optimizer in memory
CALLS = 32  # of step(), of all schedules, that are recorded
FARTHEST = 5000  # steps in which the end of a schedule is looked for
# The attribute with the length of a schedule.
LENGTHS = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps", "PolynomialLR": "total_iters"}


class Schedules(Probe):
    """Records the first calls of ``step()`` of schedules, and each schedule at the end."""

    writes = (ScheduleSeen, ScheduleStepped, PlateauSeen)

    def clear(self) -> None:
        self.calls = 0
        self.plateaus: WeakSet[Any] = WeakSet()  # those that have got a value
        self.made: list[tuple[Any, int, str]] = []  # each schedule, its length, and the line that created it

    @after(LRScheduler, "__init__")
    def _remember(self, result: None, schedule: Any, *args: Any, **kwargs: Any) -> None:
        if len(self.made) < MOST and (length := schedule_length(schedule)):
            self.made.append((schedule, length, self.recorder.where()))

    @after(lr_scheduler.SequentialLR, "__init__")
    def _join(self, result: None, schedule: Any, *args: Any, **kwargs: Any) -> None:
        """Several schedules, one after the other: the last one, such as a cosine after a warmup, ends the whole."""
        last, begin = schedule._schedulers[-1], schedule._milestones[-1]
        self.made = [each for each in self.made if not any(each[0] is part for part in schedule._schedulers)]
        if length := schedule_length(last):
            self.made.append((schedule, begin + length, self.recorder.where()))

    @before(LRScheduler, "step")
    def _step(self, schedule: Any, *args: Any, **kwargs: Any) -> None:
        if schedule.last_epoch >= 0:  # its __init__ calls step() too
            self._called(schedule, None)

    @before(ReduceLROnPlateau, "step")
    def _decide(self, schedule: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        self._called(schedule, mean(metrics) if isinstance(metrics, torch.Tensor) else float(metrics))
        with self.recorder.guard:
            if schedule not in self.plateaus:
                self.plateaus.add(schedule)
                frame = next(self.recorder.frames(), None)
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else ""
                self.note_here(PlateauSeen(mode=schedule.mode, metric=_argument(line)))

    def _called(self, schedule: Any, metric: float | None) -> None:
        if self.calls < CALLS:
            self.calls += 1
            self.note_here(ScheduleStepped(kind=type(schedule).__name__, metric=metric))

    @on("at_end")
    def _note(self) -> None:
        for schedule, length, where in self.made:
            self.recorder.note(ScheduleSeen(taken=int(schedule.last_epoch), length=length, where=where))


def _argument(line: str) -> str:
    """The name of the first argument of ``step()``, also of ``float(x)`` and ``x.item()``; "" if it is something else."""
    try:
        tree = ast.parse(line.strip())
    except SyntaxError:  # the call goes on in the next line
        return ""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step":
            given: ast.expr | None = [*call.args, *(each.value for each in call.keywords), None][0]
            while isinstance(given, ast.Call):
                method = isinstance(given.func, ast.Attribute) and given.func.attr in ("item", "cpu", "detach", "mean")
                converts = isinstance(given.func, ast.Name) and given.func.id == "float" and given.args
                given = given.func.value if method else given.args[0] if converts else None  # type: ignore[attr-defined]
            return ast.unparse(given) if isinstance(given, ast.Name | ast.Attribute | ast.Subscript) else ""
    return ""


def schedule_length(schedule: Any) -> int | None:
    """The number of steps in which a schedule falls from its highest rate to its lowest; None if it has no such end."""
    if name := LENGTHS.get(type(schedule).__name__):
        return getattr(schedule, name, None)  # None: its __init__ calls that of its base first
    if type(schedule) is lr_scheduler.LinearLR:  # a warmup rises
        return schedule.total_iters if schedule.end_factor < schedule.start_factor else None
    if type(schedule) is not lr_scheduler.LambdaLR:
        return None
    rate = schedule.lr_lambdas[0]
    values = [float(rate(step)) for step in range(FARTHEST)]
    # The first peak: a cosine without a limit rises again, also higher, if the first peak is in a warmup.
    top = next((step for step in range(FARTHEST - 1) if values[step + 1] < values[step]), FARTHEST - 1)
    end = _end_of_fall(values, top)
    while end + 1 < FARTHEST and values[end + 1] > 0.5 * values[top]:  # a restart: the rate jumps up again
        top, before = end + 1, end
        end = _end_of_fall(values, top)
        if end <= before + 2:
            return None
    return end if end > top + 2 else None  # in a schedule of stages, the rate stays where it is


def _end_of_fall(values: list[float], top: int) -> int:
    """The first step after ``top`` at which the rate does not fall further."""
    return next((step for step in range(top, FARTHEST - 1) if values[step + 1] >= values[step]), top)
