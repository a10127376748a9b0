"""Compare the nodes of a job, and name those that are slower than the others."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BUSY = 0.7  # the least share of the time of its cores that a node gets if nothing else uses them
CLOCK = 0.1  # seconds by which a clock may differ from the median of all clocks


@dataclass(frozen=True)
class Metric:
    """What is compared.

    Attributes:
        words: its name in a sentence.
        unit, size: the unit in which it is shown, and the number of base units in it.
        limit: a node is slow if its best pass is below this part of the median pass of the other nodes; above 1: above it.
        computes: whether a training computes at this speed.
    """

    words: str
    unit: str
    size: float
    limit: float
    computes: bool = False

    def best(self, values: Sequence[float]) -> float:
        """Return the best of several measurements."""
        return max(values) if self.limit < 1 else min(values)

    def show(self, value: float) -> str:
        """Return a value with its unit."""
        return (
            f"{value / self.size:,.3g} {self.unit}"
            if value < 1000 * self.size
            else f"{value / self.size:,.0f} {self.unit}"
        )


METRICS = {
    "product": Metric("matrix product on the CPU", "GFLOP/s", 1e9, 0.8, computes=True),
    "memory": Metric("copy in memory", "GB/s", 1e9, 0.8, computes=True),
    "gpu_product": Metric("matrix product on the slowest GPU", "TFLOP/s", 1e12, 0.9, computes=True),
    "gpu_memory": Metric("copy in the memory of the slowest GPU", "GB/s", 1e9, 0.9, computes=True),
    "loopback": Metric("connection with itself", "GB/s", 1e9, 0.5),
    "network": Metric("best connection with a different node", "GB/s", 1e9, 0.5),
    "latency": Metric("shortest time of a message to a different node", "us", 1e-6, 2.0),
}
COUNTS = {"cores": "core", "gpus": "GPU"}


@dataclass(frozen=True)
class Slow:
    """A node that is slower than the others, or has less.

    Attributes:
        node: its name.
        reasons: what was measured, each in one sentence.
        pace: the part of the speed of the others at which it computes; 1.0: its computing is not slow.
    """

    node: str
    reasons: tuple[str, ...]
    pace: float


def slow_nodes(nodes: Mapping[str, Mapping]) -> list[Slow]:
    """Return the nodes that differ from the others.

    Other work on a machine makes a node slow for a while. So the best pass of a node is compared with the median pass of the
    others: a node that is like the others is in half of its passes at least as fast as this median.

    Args:
        nodes: the measurements of each node by name: the keys of METRICS, and "share" (of the time of its cores that the product
            got), each with one value per pass; the keys of COUNTS; "clock" and "clock_error" in seconds. A value may be missing.
    """
    found = []
    for name, node in nodes.items():
        others = [other for other_name, other in nodes.items() if other_name != name]
        reasons, pace = [], 1.0
        for key, word in COUNTS.items():
            usual = _median(others, key)
            if usual is not None and key in node and node[key] < usual:
                plural = "s" * (node[key] != 1)
                reasons.append(f"it has {node[key]} {word}{plural}, and the others have {usual:g}")
        for key, metric in METRICS.items():
            usual, own = _median(others, key), metric.best(node[key]) if node.get(key) else None
            if usual is None or own is None or not _is_slow(own / usual, metric.limit):
                continue
            reasons.append(_reason(metric, own, usual) + (_why(node, others) if key == "product" else ""))
            if metric.computes:
                pace = min(pace, own / usual)
        if (clock := _median(list(nodes.values()), "clock")) is not None and "clock" in node:
            off = node["clock"] - clock
            if abs(off) - node.get("clock_error", 0) > CLOCK:
                reasons.append(f"its clock is {abs(off):,.1f} s {'ahead' if off > 0 else 'behind'}")
        if reasons:
            found.append(Slow(name, tuple(reasons), pace))
    return found


def busy(nodes: Mapping[str, Mapping]) -> float | None:
    """Return the share of the time of its cores that the median node got, if something else uses the cores of most nodes."""
    share = _median(list(nodes.values()), "share")
    return share if share is not None and share < BUSY else None


def _median(nodes: list[Mapping], key: str) -> float | None:
    """Return the median over nodes of a value, or of the median of its passes."""
    values = [node[key] for node in nodes if key in node]
    return (
        statistics.median(statistics.median(each) if isinstance(each, list) else each for each in values)
        if values
        else None
    )


def _is_slow(ratio: float, limit: float) -> bool:
    return ratio < limit if limit < 1 else ratio > limit


def _reason(metric: Metric, value: float, usual: float) -> str:
    compared = f"{value / usual:.0%} of" if metric.limit < 1 else f"{value / usual:,.1f} times"
    return f"{metric.words}: {metric.show(value)}, {compared} the median of the others ({metric.show(usual)})"


def _why(node: Mapping, others: list[Mapping]) -> str:
    """Say whether a slow product shares its cores, or whether the cores themselves are slow."""
    share, usual = _median([node], "share"), _median(others, "share")
    if share is None or usual is None:
        return ""
    if share < 0.8 * usual:
        return f"; it got {share:.0%} of the time of its cores (the others {usual:.0%}), so something else uses them"
    return "; it got the time of its cores, so the cores themselves are slow or fewer"
