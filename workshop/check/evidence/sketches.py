"""Comparing sketches of tensors: their norm, and some of their values."""

import math
from collections.abc import Sequence

from workshop.check.evidence.events import Sketch

CLOSE = 1e-3  # relative difference between two ranks' tensors from which on they count as different


def difference(first: Sequence[Sketch], second: Sequence[Sketch]) -> float:
    """The largest relative difference between two lists of sketches; infinity where only one of them has a tensor."""
    if len(first) != len(second):
        return math.inf
    return max((_tensor_difference(one, other) for one, other in zip(first, second, strict=True)), default=0.0)


def _tensor_difference(one: Sketch, other: Sketch) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    scale = max(one[0], other[0])
    if scale == 0:
        return 0.0
    if not math.isfinite(scale):
        return 0.0 if one[0] == other[0] else math.inf
    norm = abs(one[0] - other[0]) / scale
    top = max((abs(value) for value in (*one[1], *other[1])), default=0.0) or scale
    values = max((abs(a - b) for a, b in zip(one[1], other[1], strict=False)), default=0.0) / top
    return max(norm, values)


def different_names(first: Sequence[Sketch], second: Sequence[Sketch], names: Sequence[str]) -> list[str]:
    """The names of the tensors in which two lists of sketches differ."""
    pairs = zip(first, second, names, strict=False)
    return [name or "?" for one, other, name in pairs if _tensor_difference(one, other) > CLOSE]


def ratio(first: Sequence[Sketch], second: Sequence[Sketch]) -> float | None:
    """By what factor all tensors of ``first`` are those of ``second``; None if there is no such factor."""
    ratios = []
    for one, other in zip(first, second, strict=False):
        if one is None or other is None or other[0] == 0 or one[0] == 0:
            continue
        factor = one[0] / other[0]
        top = max((abs(value) for value in one[1]), default=0.0)
        if top and max(abs(a - factor * b) for a, b in zip(one[1], other[1], strict=False)) > 0.02 * top:
            return None
        ratios.append(factor)
    if not ratios or max(ratios) / min(ratios) > 1.03:
        return None
    return sum(ratios) / len(ratios)
