"""``workshop plan --fit``: find the constants with which predictions agree best with published runs."""

import math
import re
from collections import Counter, defaultdict
from dataclasses import fields

from workshop.plan.published import Run
from workshop.plan.time import CONSTANTS, Constants, predict

# Each constant: the value we expect, and the factor (as a logarithm) by which it may differ from it at the cost of one row
# that is wrong by SPREAD. A constant that the rows say nothing about keeps the expected value.
EXPECTED = {
    "matmul": (0.85, 0.1),
    "attention": (0.6, 0.3),
    "traffic": (1.1, 0.25),
    "link": (0.75, 0.2),
    "network": (0.75, 0.2),
    "latency": (1.2, 0.4),
    "overlap": (0.85, 0.1),
    "step": (0.03, 0.35),
}
BOUNDS = {"matmul": (0.5, 1.1), "link": (0.3, 1.0), "network": (0.15, 1.0), "overlap": (0.3, 1.0)}
SPREAD = 0.1  # of tokens/s: the error that we expect of a row
FULL = 6  # rows of a source count fully up to this number; those of a source with more rows count less each
MOST = 24  # rows of a source that are fitted to


def relative_error(run: Run, constants: Constants) -> float:
    """Return predicted over published tokens per second, minus 1."""
    step = predict(run.model, run.layout, run.card, run.sequence_length, constants).step
    return run.layout.global_batch * run.sequence_length / step / run.layout.gpus / run.tokens - 1


def fit(runs: list[Run], start: Constants | None = None) -> Constants:
    """Return the constants with the smallest squared errors, with large errors counted less (soft l1).

    Args:
        runs: published runs of dense models.
        start: where the search begins; None: at the expected values.
    """
    import numpy as np
    from scipy.optimize import least_squares

    names = [field.name for field in fields(Constants)]
    chosen = thinned(runs)
    count = Counter(run.group for run in chosen)
    weights = [min(1.0, (FULL / count[run.group]) ** 0.5) for run in chosen]

    def residuals(logarithms):
        constants = Constants(*np.exp(logarithms).tolist())
        rows = [
            weight * math.log1p(relative_error(run, constants)) / SPREAD
            for run, weight in zip(chosen, weights, strict=True)
        ]
        priors = [
            (value - math.log(EXPECTED[name][0])) / EXPECTED[name][1]
            for value, name in zip(logarithms, names, strict=True)
        ]
        return rows + priors

    limits = [BOUNDS.get(name, (EXPECTED[name][0] / 10, EXPECTED[name][0] * 10)) for name in names]
    begin = [math.log(getattr(start, name) if start else EXPECTED[name][0]) for name in names]
    bounds = ([math.log(low) for low, _ in limits], [math.log(high) for _, high in limits])
    begin = [min(max(value, low + 1e-6), high - 1e-6) for value, low, high in zip(begin, *bounds, strict=True)]
    found = least_squares(residuals, begin, bounds=bounds, loss="soft_l1", xtol=1e-4, ftol=1e-5)
    return Constants(*np.exp(found.x).tolist())


def thinned(runs: list[Run]) -> list[Run]:
    """Return at most MOST runs of each source, at equal distances in its rows."""
    groups = defaultdict(list)
    for run in runs:
        groups[run.group].append(run)
    return [
        found[index * len(found) // min(len(found), MOST)]
        for found in groups.values()
        for index in range(min(len(found), MOST))
    ]


def write(constants: Constants, runs: list[Run], path=CONSTANTS) -> None:
    """Write constants.toml."""
    lines = [
        f"# Written by `workshop plan --fit` from {len(runs)} published runs of {len({run.group for run in runs})} projects.",
    ]
    meanings = dict(re.findall(r"^ +(\w+): (.+?)(?=^ +\w+: |\Z)", Constants.__doc__ or "", re.MULTILINE | re.DOTALL))
    for name, value in vars(constants).items():
        lines += ["", f"# {' '.join(meanings[name].split())}", f"{name} = {value:.4g}"]
    path.write_text("\n".join(lines) + "\n")
