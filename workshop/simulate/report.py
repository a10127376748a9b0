"""Print a summary of a simulated step, and draw its timeline."""

from pathlib import Path

from rich.console import Console

from workshop.simulate.recorder import FORWARD, KINDS, PASSES, RECOMPUTE, UPDATE, Recorder
from workshop.simulate.summary import curves

MEANING = {
    "parameters": "this rank's part",
    "optimizer": "the moments of AdamW",
    "gradients": "this rank's part, complete when the optimizer step begins",
    "activations": "made in a forward pass; most are kept for the backward pass",
    "gathered": "whole parameters that FSDP has gathered",
    "messages": "buffers of collectives; DDP keeps its buckets",
    "temporary": "gradients in transit, recomputed activations, the optimizer's results",
}


def size(number: float) -> str:
    """Return a number of bytes with a unit."""
    for unit, value in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= value:
            return f"{number / value:,.2f} {unit}"
    return f"{number:,.0f} B"


def place(module: str, doing: str) -> str:
    """Return where in the step something happens, as a text."""
    if doing == UPDATE:
        return "the optimizer step"
    where = module or ("the loss, or a different line outside the modules" if doing == FORWARD else "the loss")
    return {"forward": "the forward pass", "backward": "the backward pass", "recompute": "recomputing"}[
        doing
    ] + f" of {where}"


def aligned(rows: list[tuple], left: set[int]) -> str:
    """Return rows of texts as lines with columns: on the left for these numbers of columns, otherwise on the right."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(map(str, row), widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def show(console: Console, found: dict) -> None:
    """Print the tables of a summary."""
    rows = [("bytes on this rank", "between steps", "maximum", "at the peak", "")]
    for kind in KINDS:
        if found["most"][kind]:
            cells = (found["between_steps"].get(kind, 0), found["most"][kind], found["peak"]["of"][kind])
            rows.append((kind, *map(size, cells), MEANING[kind]))
    rows.append(("total", size(sum(found["between_steps"].values())), "", size(found["peak"]["bytes"]), ""))
    console.print(aligned(rows, {0, 4}), soft_wrap=True)
    console.print(f"The peak is in {place(found['peak']['module'], found['peak']['pass'])}.\n", soft_wrap=True)
    if found["collectives"]:
        rows = [("group", "ranks", "collective", "pass", "module", "bytes", "times", "total")]
        for row in found["collectives"]:
            sizes = (size(row["bytes"]), f"{row['times']:,}", size(row["bytes"] * row["times"]))
            rows.append((row["group"], row["ranks"], row["collective"], row["pass"], row["module"] or "-", *sizes))
        console.print("collectives in a step (bytes: of the whole tensor)")
        console.print(aligned(rows, {0, 2, 3, 4}), soft_wrap=True)
    else:
        console.print("This rank calls no collective in a step.")
    _show_flops(console, found["flops"])


def _show_flops(console: Console, found: list[dict]) -> None:
    """Print the floating-point operations of each kind of module in teraFLOP."""
    passes = [each for each in PASSES if any(each in row for row in found)]
    rows = [("TFLOP of this rank", "modules", *passes)]
    for row in found:
        cells = (f"{row[each] / 1e12:,.3f}" if each in row else "-" for each in passes)
        rows.append((row["module"] or "outside the modules", row["modules"], *cells))
    sums = [sum(row.get(each, 0) for row in found) for each in passes]
    rows.append(("total", "", *(f"{each / 1e12:,.3f}" for each in sums)))
    console.print()
    console.print(aligned(rows, {0}), soft_wrap=True)


def draw(path: Path, title: str, recorder: Recorder, found: dict, name_of) -> None:
    """Draw the memory and the collectives by their position in the step.

    Args:
        path: the PNG file to write.
        title: the title of the picture.
        recorder: of the step.
        found: the summary.
        name_of: as for ``summary``.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws into files; needs no screen
    import matplotlib.pyplot as plt

    from workshop.measure.plots import COLOURS

    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(11, 7), sharex=True, height_ratios=(3, 1), facecolor="white", layout="constrained"
    )
    figure.suptitle(title)
    positions, series = curves(recorder)
    shown = [kind for kind in KINDS if found["most"][kind]]
    unit, name = (1e9, "GB") if recorder.peak > 1e9 else (1e6, "MB")
    values = [[value / unit for value in series[kind]] for kind in shown]
    colours = [COLOURS[KINDS.index(kind)] for kind in shown]
    together = [sum(each) for each in zip(*values, strict=True)]
    upper.step(positions, together, where="post", color="black", linewidth=0.5)
    upper.stackplot(positions, values, labels=shown, colors=colours, step="post", linewidth=0)
    peak = recorder.peak_at[0]
    upper.plot([peak], [recorder.peak / unit], "kv", label=f"peak: {size(recorder.peak)}")
    upper.set(ylabel=f"{name} on this rank", ylim=(0, 1.12 * recorder.peak / unit))
    upper.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    _mark_passes(upper, recorder)
    lanes = sorted({name_of(call.group)[0] for call in recorder.calls})
    kinds = sorted({call.kind for call in recorder.calls})
    for kind, colour in zip(kinds, COLOURS, strict=False):
        calls = [call for call in recorder.calls if call.kind == kind]
        heights = [lanes.index(name_of(call.group)[0]) for call in calls]
        most = max(call.bytes for call in recorder.calls)
        areas = [4 + 90 * call.bytes / most for call in calls]
        lower.scatter(
            [call.position for call in calls], heights, s=areas, color=colour, alpha=0.6, linewidth=0, label=kind
        )
    lower.set_yticks(range(len(lanes)), lanes)
    lower.set(ylim=(-0.7, len(lanes) - 0.3), xlabel="operations of PyTorch since the step began", ylabel="group")
    if kinds:
        lower.legend(fontsize=8, ncols=len(kinds), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _mark_passes(axes, recorder: Recorder) -> None:
    """Write where the passes begin. (In a pipeline they alternate, and have no room for names.)"""
    begins = [(position, doing) for position, doing in recorder.passes if doing != RECOMPUTE]
    while begins and begins[-1][1] == FORWARD:  # what follows the optimizer step is none
        begins.pop()
    changes = [each for before, each in zip([(0, ""), *begins], begins, strict=False) if each[1] != before[1]]
    for position, doing in changes if len(changes) <= 4 else ():
        axes.axvline(position, color="grey", linewidth=0.8, linestyle="dashed")
        side = "right" if doing == UPDATE else "left"
        axes.text(position, axes.get_ylim()[1], f" {doing} ", va="top", ha=side, fontsize=9)
