"""Local SGD: each rank takes several steps of its own, and then the ranks average their parameters or the changes of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workshop.check.evidence.events import Collective, Sketch, StepBegun, StepTaken, Wrapped
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference

EXACT = 0.01  # relative difference of a sum of changes that rounding explains
EQUAL = 1e-5  # the same of parameters after the same step
Values = list[float]  # those in the sketches of all parameters


@dataclass(frozen=True)
class Exchange:
    """What a rank does between the last step of its own and its next step, in which all ranks have the same parameters."""

    begun: StepBegun  # the first step of its own
    ended: StepTaken  # the last one
    calls: list[Collective]
    following: StepBegun

    @property
    def outer(self) -> bool:
        """Whether the next step is that of a different optimizer, which gets the changes as gradients."""
        return self.following.trainer != self.begun.trainer


def of_its_own(run: Run) -> bool:
    """Whether each rank takes several steps of its own, and then they average their parameters (local SGD; in no exercise).

    Ranks that began alike have different parameters before some steps, and equal ones before a later step; with
    DistributedDataParallel (its post_localSGD_hook, or no_sync), this must happen twice.
    """
    ranks = run.trained
    wrapped = any(process.first(Wrapped) for process in ranks)
    if run.asked:
        return False
    if not wrapped and all(_begin_rounds_alike(ranks[0], process) for process in ranks[1:]):
        return len(ranks) > 1
    alike: dict[object, list[bool]] = {}  # for each optimizer
    for first, *others in zip(*(process.steps for process in ranks), strict=False):
        same = all(difference(first.before.weights, step.before.weights) <= CLOSE for step in others)
        alike.setdefault(first.before.trainer, []).append(same)
    return any(each[0] and list(pairwise(each)).count((False, True)) > wrapped for each in alike.values())


def exchanged_in_steps(ranks: list[Process]) -> bool:
    """Whether each step leaves equal parameters on all ranks: then its optimizer exchanges the gradients itself."""
    found = []
    for first, *others in zip(*(process.steps for process in ranks), strict=False):
        if first.after and first.after.weights != first.before.weights:
            found += [each.after and difference(first.after.weights, each.after.weights) < EQUAL for each in others]
    return len(found) > 2 and all(found)


def own_parts(ranks: list[Process]) -> bool:
    """Whether the optimizer of each rank has other parameters, as in a ZeRO of the program itself."""
    names = [set(process.steps[0].before.names) for process in ranks]
    return len(ranks) > 1 and all(own.isdisjoint(other) for own, other in pairwise(names))


def _begin_rounds_alike(one: Process, other: Process) -> bool:
    """Whether two ranks have the same parameters after each exchange, and then take several steps, each its own number."""
    mine, theirs = _rounds(one), _rounds(other)
    alike = all(difference(a.weights, b.weights) <= CLOSE for a, b in zip(mine, theirs, strict=False))
    return (
        2 < len(mine) == len(theirs) < len(one.steps) / 2
        and alike
        and one.steps[1].before.weights != other.steps[1].before.weights
    )


def _rounds(process: Process) -> list[StepBegun]:
    """The first step after each exchange."""
    found: list[StepBegun] = []
    exchanged = True
    for _, event in process.events:
        if isinstance(event, Collective) and "barrier" not in event.name:
            exchanged = True
        elif isinstance(event, StepBegun) and exchanged:
            found.append(event)
            exchanged = False
    return found


def sum_of_changes(run: Run) -> tuple[str, str] | None:
    """If the ranks add up their parameters, or the changes of them, and do not divide the sum: what was seen, and its line."""
    count = len(run.trained)
    together = zip(*(_exchanges(process) for process in run.trained), strict=False) if count > 1 else ()
    found = [(each[0], factors) for each in together if (factors := _factors(each))]
    for index, what in enumerate(("their parameters", "the changes of their parameters")):
        if len(found) > 1 and all(abs(abs(factors[index]) / count - 1) < EXACT for _, factors in found):
            exchange = found[0][0]
            gets = "the outer optimizer gets" if exchange.outer else "the result is"
            seen = f"after steps of their own, the ranks add up {what}: {gets} {count:.2f} times the average"
            return seen, exchange.calls[0].where
    return None


def _exchanges(process: Process) -> Iterator[Exchange]:
    """Yield the exchanges of a rank that follow two or more steps of its own."""
    begun: list[StepBegun] = []
    ended: StepTaken | None = None
    calls: list[Collective] = []
    for _, event in process.events:
        if isinstance(event, Collective) and "barrier" not in event.name:
            calls.append(event)
        elif isinstance(event, StepTaken):
            ended = event
        elif isinstance(event, StepBegun):
            exchange = Exchange(begun[0], ended, calls, event) if calls and len(begun) > 1 and ended else None
            if exchange and len(exchange.ended.weights) == len(event.weights):
                yield exchange
            if calls:
                begun, ended, calls = [], None, []
            if not (exchange and exchange.outer) and (not begun or begun[0].trainer == event.trainer):
                begun.append(event)


def _factors(ranks: Sequence[Exchange]) -> tuple[float, float] | None:
    """By what multiples of the average the exchange sets the parameters, and changes them; None: the ranks did not differ."""
    first = ranks[0]
    if any(difference(each.following.weights, first.following.weights) > CLOSE for each in ranks[1:]):
        return None
    ends = [_values(each.ended.weights) for each in ranks]
    start = _values(first.following.weights if first.outer else first.begun.weights)
    changes = [_minus(each, start) for each in ends]
    if not start or any(len(each) != len(start) for each in ends) or _far(changes) < EXACT:
        return None
    if first.outer:
        return 0.0, _multiple(_values(first.following.gradients), _average(changes))
    after = _values(first.following.weights)
    return _multiple(after, _average(ends)), _multiple(_minus(after, start), _average(changes))


def _multiple(values: Values, of: Values) -> float:
    """By what factor these values are others; 0: by no common factor."""
    square = sum(value * value for value in of)
    if len(values) != len(of) or not square or not math.isfinite(sum(values)):
        return 0.0
    factor = sum(one * other for one, other in zip(values, of, strict=True)) / square
    rest = max(abs(one - factor * other) for one, other in zip(values, of, strict=True))
    return factor if rest <= EXACT * max(map(abs, values)) else 0.0


def _average(changes: Sequence[Values]) -> Values:
    return [sum(values) / len(changes) for values in zip(*changes, strict=True)]


def _values(sketches: Sequence[Sketch]) -> Values:
    return [value for each in sketches if each for value in each[1]]


def _minus(one: Values, other: Values) -> Values:
    return [here - there for here, there in zip(one, other, strict=False)]


def _far(changes: Sequence[Values]) -> float:
    """How far the changes of the ranks are from each other, relative to their size."""
    size = max((abs(value) for each in changes for value in each), default=0.0)
    apart = max((max(values) - min(values) for values in zip(*changes, strict=True)), default=0.0)
    return apart / size if size else 0.0
