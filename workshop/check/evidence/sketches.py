"""Compare sketches of tensors: the norm and some of the values."""

import math
from collections.abc import Sequence

from workshop.check.evidence.events import Sketch

NEGLIGIBLE = 1e-6  # a tensor whose norm is smaller than this share of the largest one contains only rounding errors
CLOSE = 1e-3  # relative difference above which tensors of two ranks count as different


def difference(first: Sequence[Sketch], second: Sequence[Sketch], least: float = 0.0) -> float:
    """Return the largest relative difference between two lists of sketches; infinity if only one of them has a tensor.

    Args:
        first, second: the sketches.
        least: a share of the largest norm; smaller tensors, which can be rounding errors, are compared with this share.
    """
    if len(first) != len(second):
        return math.inf
    norms = [each[0] for each in (*first, *second) if each and math.isfinite(each[0])]
    floor = least * max(norms, default=0.0)
    return max((_tensor_difference(one, other, floor) for one, other in zip(first, second, strict=True)), default=0.0)


def _tensor_difference(one: Sketch, other: Sketch, floor: float = 0.0) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if not math.isfinite(one[0]) or not math.isfinite(other[0]):
        return 0.0 if one[0] == other[0] or (math.isnan(one[0]) and math.isnan(other[0])) else math.inf
    scale = max(one[0], other[0], floor)
    if scale == 0:
        return 0.0
    norm = abs(one[0] - other[0]) / scale
    top = max([floor, *map(abs, (*one[1], *other[1]))]) or scale
    return max([norm, *(abs(a - b) / top for a, b in zip(one[1], other[1], strict=False))])


def different_names(first: Sequence[Sketch], second: Sequence[Sketch], names: Sequence[str]) -> list[str]:
    """Return the names of the tensors that differ between two lists of sketches."""
    pairs = zip(first, second, names, strict=False)
    return [name or "?" for one, other, name in pairs if _tensor_difference(one, other) > CLOSE]


def ratio(first: Sequence[Sketch], second: Sequence[Sketch]) -> float | None:
    """Return the factor between all tensors of ``first`` and ``second``; None if there is no common factor.

    Tensors with only rounding errors do not count, such as the gradient of the bias of the keys in attention.
    """
    ratios = []
    least = [NEGLIGIBLE * max((each[0] for each in part if each), default=0.0) for part in (first, second)]
    for one, other in zip(first, second, strict=False):
        if not one or not other or not math.isfinite(one[0]) or not math.isfinite(other[0]):
            continue
        if one[0] > least[0] and other[0] > least[1]:
            factor = one[0] / other[0]
            top = max(map(abs, one[1]), default=0.0)
            if top and max(abs(a - factor * b) for a, b in zip(one[1], other[1], strict=False)) > 0.02 * top:
                return None
            ratios.append(factor)
    return sum(ratios) / len(ratios) if ratios and max(ratios) / min(ratios) <= 1.03 else None
