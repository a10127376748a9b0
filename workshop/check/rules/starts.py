"""What two starts of a program show about each other, and about an uninterrupted run."""

import math
from copy import copy
from dataclasses import replace
from itertools import takewhile

from workshop.check.evidence.events import CheckpointCalled, Loaded, Saved, StepSkipped
from workshop.check.evidence.process import Process, Step
from workshop.check.evidence.run import Run
from workshop.check.rules.alike import SAME, begin_apart
from workshop.check.rules.words import plural
from workshop.check.scenarios import Split


def loading(run: Run, first: Run | None = None) -> str:
    """The line that loads the checkpoint: the last one before the training, because a program may look into it first.

    ``first``: the first start. What loads a file with parameters that it has saved comes before what loads data, for example.
    """
    saved = (
        {event.path.rsplit("/", 1)[-1] for event in first.all(Saved) if event.keys or event.whole} if first else set()
    )
    for process in run.ranks[:1]:
        begin = process.steps[0].seconds if process.steps else math.inf
        loads = [event for seconds, event in process.timed(Loaded) if seconds <= begin and event.where]
        own = [event for event in loads if event.path.rsplit("/", 1)[-1] in saved]
        found = [event.where for event in own or loads]
        sharded = [event.where for event in process.of(CheckpointCalled) if event.name == "load"]
        return (found or sharded or [""])[-1]
    return run.where(Loaded)


def torn_by_writers(split: Split) -> bool:
    """Whether the second start fails with a file that several ranks of the first run wrote."""
    shared = {path.rsplit("/", 1)[-1] for path, *_ in split.first.shared_files()}
    loaded = {event.path.rsplit("/", 1)[-1] for event in split.second.all(Loaded) if event.path}
    return bool(shared & loaded)


def uneven(whole: Run) -> bool:
    """Whether the ranks of an uninterrupted run take different numbers of steps, so that it is no mistake of the restart."""
    return len({len(process.steps) for process in whole.trained}) > 1


def without_further_steps(whole: Run, split: Split) -> Split:
    """A second start without the steps after the end of an uninterrupted run, if it has gone on where the first one ended.

    Some programs count ``--epochs`` from the checkpoint on, so they train longer after a restart, but repeat nothing.
    """
    if not (whole.trained and split.first.trained and split.second.trained):
        return split
    base, done, rest = (run.trained[0].steps for run in (whole, split.first, split.second))
    left = base[len(done) :]
    on = [one.keys and one.keys == other.keys for one, other in zip(left, rest, strict=False)]
    again = all(one.keys == other.keys for one, other in zip(base, rest, strict=False))
    if not (0 < len(left) < len(rest)) or not all(on) or again or begin_apart(rest[0], left[0]) > SAME:
        return split
    processes = [_up_to(process, len(left)) for process in split.second.processes]
    return replace(split, second=replace(split.second, processes=processes))


def _up_to(process: Process, steps: int) -> Process:
    """A process without the events from a step on."""
    if len(process.steps) <= steps:
        return process
    short, end = copy(process), process.steps[steps].before
    short.forget()
    short.events = list(takewhile(lambda each: each[1] is not end, process.events))
    return short


def in_closure(steps: list[Step]) -> bool:
    """Whether a step calls its closure several times, such as one of L-BFGS: each call counts here, and their number varies."""
    return any(step.after is None for step in steps[:-1])


def scale_lost(whole: Run, split: Split) -> str:
    """Whether a GradScaler skips more steps in two starts than in one; "" if not."""
    more = 0 if whole.cut else _skipped(split.second) + _skipped(split.first) - _skipped(whole)
    seen = (
        f"after the second start GradScaler skips {plural(more, 'step')} that it does not skip in an uninterrupted run"
    )
    return f"{seen}: its scale is not restored" if more > 0 else ""


def _skipped(run: Run) -> int:
    """The number of steps that a GradScaler has skipped in the first rank."""
    return sum(len(process.of(StepSkipped)) for process in run.ranks[:1])
