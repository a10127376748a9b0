"""Gradients of several backward passes that a program reduces by hand, and adds up in tensors of its own."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from workshop.check.evidence.events import Backward, Collective, Sketch, StepBegun
from workshop.check.evidence.process import Process
from workshop.check.evidence.reductions import Reduction
from workshop.check.evidence.run import Run

LEAST = 100  # elements of a tensor of gradients
EXACT = 0.01  # relative difference of a sum that rounding explains


def reduces_each_batch(run: Run) -> bool:
    """Whether a step has several backward passes, each with a reduction after it, and its optimizer has other tensors."""
    for process in run.trained[:1]:
        if any(step.before.of_model or step.before.sharded for step in process.steps):
            return False
        kinds = [kind for _, event in process.events if (kind := _kind(event))]
        passes = "".join(kind for kind, _ in groupby(kinds)).split("s")
        return any(part.endswith("brbr") for part in passes)
    return False


def _kind(event: object) -> str:
    """A letter for a backward pass, a step and a reduction of gradients; "" for other events."""
    if isinstance(event, Backward | StepBegun):
        return "b" if isinstance(event, Backward) else "s"
    reduces = isinstance(event, Collective) and event.name.startswith(("all_reduce", "reduce"))
    return "r" if isinstance(event, Collective) and reduces and math.prod(event.shape or ()) >= LEAST else ""


def counted_twice(process: Process) -> tuple[int, str] | None:
    """If the gradient of each step contains its first batch several times: how often, and the line of the reduction."""
    found: list[tuple[int, str]] = []
    batches: list[list[Reduction]] = []  # the reductions since .grad was empty, for each backward pass
    steps = 0
    for each in process.reductions:
        if each.what == "backward":
            batches = [*batches, []] if each.left else [[]]
        elif each.what == "reduced" and batches:
            batches[-1].append(each)
        elif each.what == "step":
            steps += 1
            where = _summed(batches, each.sketches)
            found += [(len(batches), where)] if where else []
            batches = []
    return found[0] if found and len(found) == steps else None


def _summed(batches: Sequence[Sequence[Reduction]], gradients: Sequence[Sketch]) -> str:
    """The line of reductions whose results are added up, although each result contains the earlier ones; "" if there is none."""
    if len(batches) < 2 or not all(batches):
        return ""
    together: Iterator[tuple[Reduction, ...]] = zip(*batches, strict=False)
    for results in together:
        if len({each.where for each in results}) > 1:
            continue
        values = [each.sketches[0][1] for each in results if each.sketches[0]]
        if len({len(each) for each in values}) != 1 or len(values) < len(batches):
            continue
        total = [sum(each) for each in zip(*values, strict=True)]
        for gradient in gradients:
            if gradient and _proportional(gradient[1], total) and not _proportional(gradient[1], values[-1]):
                return results[0].where
    return ""


def _proportional(one: Sequence[float], other: Sequence[float]) -> bool:
    square = sum(value * value for value in other)
    if len(one) != len(other) or len(one) < 2 or not square or not any(one):
        return False
    factor = sum(a * b for a, b in zip(one, other, strict=True)) / square
    return max(abs(a - factor * b) for a, b in zip(one, other, strict=True)) <= EXACT * max(map(abs, one))
