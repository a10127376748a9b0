"""What a simulated step needs, as data for JSON: bytes by kind, collectives, operations of the layers, and the timeline."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable

import torch.distributed as dist

from workshop.simulate.recorder import KINDS, Recorder

POINTS = 300  # of the timeline in the file


def curves(recorder: Recorder) -> tuple[list[int], dict[str, list[int]]]:
    """Return the operations at which the memory changes, and the bytes of each kind after these operations."""
    now, positions, found = dict.fromkeys(KINDS, 0), [], {kind: [] for kind in KINDS}
    for position, storage, by in recorder.log:
        now[storage.kind] += by
        positions.append(position)
        for kind in KINDS:
            found[kind].append(now[kind])
    return positions, found


def summary(recorder: Recorder, name_of: Callable[[dist.ProcessGroup | None], tuple[str, int]]) -> dict:
    """Return what happened in a step.

    Args:
        recorder: of the step.
        name_of: returns the name of a group and the number of its ranks.
    """
    positions, found = curves(recorder)
    totals = [sum(values) for values in zip(*found.values(), strict=True)]
    top = max(range(len(totals)), key=totals.__getitem__, default=0)
    at_peak = {kind: values[top] if values else 0 for kind, values in found.items()}
    _, module, doing = recorder.peak_at
    return {
        "between_steps": recorder.kept,
        "gradients": recorder.gradients,
        "most": {kind: max(values, default=0) for kind, values in found.items()},
        "peak": {
            "bytes": recorder.peak,
            "module": module,
            "pass": doing,
            "operation": recorder.peak_at[0],
            "of": at_peak,
        },
        "collectives": _collectives(recorder, name_of),
        "flops": _flops(recorder),
        "operations": recorder.position,
        "timeline": _timeline(recorder, positions, totals, found),
    }


def _collectives(recorder: Recorder, name_of) -> list[dict]:
    """Return a row for each group, kind of collective, size, pass and kind of module, the most bytes first."""
    rows: Counter[tuple] = Counter()
    for call in recorder.calls:
        group, ranks = name_of(call.group)
        rows[group, ranks, call.kind, call.bytes, call.doing, pattern(call.module)] += 1
    columns = ("group", "ranks", "collective", "bytes", "pass", "module")
    found = [dict(zip(columns, row, strict=True)) | {"times": times} for row, times in rows.items()]
    return sorted(found, key=lambda row: (row["group"], -row["bytes"] * row["times"]))


def _flops(recorder: Recorder) -> list[dict]:
    """Return a row for each kind of module: how many modules of this kind have operations, and how many operations by pass."""
    modules: defaultdict[str, set] = defaultdict(set)
    counts: defaultdict[str, Counter] = defaultdict(Counter)
    for (module, doing), flops in recorder.flops.items():
        modules[pattern(module)].add(module)
        counts[pattern(module)][doing] += flops
    return [{"module": kind, "modules": len(modules[kind])} | counts[kind] for kind in counts]


def _timeline(recorder: Recorder, positions: list[int], totals: list[int], found: dict[str, list[int]]) -> dict:
    """Return at most POINTS points: of each part of the step, the moment with the most bytes."""
    best: dict[int, int] = {}
    for index, position in enumerate(positions):
        part = position * POINTS // (recorder.position + 1)
        if part not in best or totals[index] > totals[best[part]]:
            best[part] = index
    chosen = list(best.values())
    series = {kind: [values[index] for index in chosen] for kind, values in found.items()}
    return {"operation": [positions[index] for index in chosen], "passes": recorder.passes[:POINTS], **series}


def pattern(module: str) -> str:
    """Return the name of a module with * in place of numbers: "layers.*.mlp" for each "layers.3.mlp"."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module)
