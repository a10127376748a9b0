"""Draw pictures for notebooks: with colours that colour-blind people can distinguish, with a white background also in a dark
theme, and with alternative text."""

import base64
import io
from collections.abc import Mapping, Sequence

from workshop.measure.plots import COLOURS
from workshop.repository import ROOT


def show_figure(figure, text: str) -> None:
    """Show a matplotlib figure below the cell; ``text`` is its alternative text."""
    import matplotlib.pyplot as plt
    from IPython.display import HTML, display

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, facecolor="white", bbox_inches="tight")
    plt.close(figure)
    data = base64.b64encode(picture.getvalue()).decode()
    display(
        HTML(f'<img alt="{text.replace(chr(34), chr(39))}" style="max-width:100%" src="data:image/png;base64,{data}">')
    )


def show_tensors(shown: Sequence[Sequence[tuple[str, list]]]) -> None:
    """Draw tensors with one or two dimensions: one row per rank, one column per name.

    Args:
        shown: for each rank, pairs of a name and a nested list of numbers.
    """
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for pairs in shown for name, _ in pairs))
    tables = [{name: _table(values) for name, values in pairs} for pairs in shown]
    numbers = [number for row in tables for table in row.values() for line in table for number in line]
    low, high = min(numbers), max(numbers)
    widths = [max((len(row[name][0]) for row in tables if name in row), default=1) for name in names]
    heights = [max((len(table) for table in row.values()), default=1) for row in tables]
    figure, axes = plt.subplots(
        len(tables),
        len(names),
        figsize=(0.62 * sum(widths) + 1.1 * len(names) + 0.8, 0.5 * sum(heights) + 0.25 * len(tables) + 0.3),
        gridspec_kw={"width_ratios": widths, "height_ratios": heights},
        squeeze=False,
    )
    for rank, row in enumerate(tables):
        for column, name in enumerate(names):
            cell = axes[rank][column]
            cell.set(xticks=[], yticks=[])
            cell.spines[:].set_visible(False)
            if rank == 0:
                cell.set_title(name, fontsize=11)
            if column == 0:
                cell.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", fontsize=11)
            if name in row:
                cell.imshow(row[name], cmap="cividis", vmin=low, vmax=high if high > low else low + 1, aspect="equal")
                for y, line in enumerate(row[name]):
                    for x, number in enumerate(line):
                        dark = (number - low) < 0.55 * (high - low)
                        cell.text(x, y, f"{number:.3g}", ha="center", va="center", color="white" if dark else "black")
    text = "; ".join(
        f"rank {rank}: " + ", ".join(f"{name} {_words(values)}" for name, values in pairs)
        for rank, pairs in enumerate(shown)
    )
    show_figure(figure, text)


def _words(values) -> str:
    """Format nested lists of numbers with three digits."""
    return f"[{', '.join(map(_words, values))}]" if isinstance(values, list) else f"{values:.3g}"


def _table(values) -> list[list[float]]:
    """Convert a nested list with one or two dimensions to rows of numbers, at most 8 rows with 16 numbers."""
    if not isinstance(values, list):
        values = [values]
    rows = values if values and isinstance(values[0], list) else [values]
    if not rows or not rows[0] or isinstance(rows[0][0], list):
        raise ValueError("show() draws only tensors with one or two dimensions that are not empty")
    return [[float(number) for number in row[:16]] for row in rows[:8]]


def show_losses(runs: Mapping[str, Sequence[dict]]) -> None:
    """Draw the loss curves of one or several runs in one plot.

    Args:
        runs: for the label of each run, the epochs of its log (``workshop.training.logs.read_log``).
    """
    curves = {label: [loss for epoch in epochs for loss in epoch["losses"]] for label, epochs in runs.items()}
    show_curves(curves, "loss, mean over the global batch")


def show_curves(curves: Mapping[str, Sequence[float]], what: str) -> None:
    """Draw one value per step, for one or several runs, in one plot.

    Args:
        curves: for each label, the values of the steps.
        what: the description of the values, which begins with a noun.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.4))
    parts = []
    for index, (label, values) in enumerate(curves.items()):
        # If curves coincide, each one is narrower than the one before, which remains visible at the edges.
        width = 1.5 + 3 * (len(curves) - 1 - index)
        axes.plot(range(1, len(values) + 1), values, label=label, color=COLOURS[index], linewidth=width)
        parts.append(f"{label} from {values[0]:.3g} to {values[-1]:.3g} in {len(values)} steps" if values else label)
    axes.set(xlabel="step", ylabel=what)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    noun = what.partition(",")[0]
    show_figure(figure, f"{noun[0].upper()}{noun[1:]} curves: " + "; ".join(parts))


def show_bars(values: Mapping[str, float], unit: str, guesses: Mapping[str, float | None] | None = None) -> None:
    """Draw a bar for each value, and your guess, if there is one, as a dashed line across it.

    Args:
        values: the length of each bar, by its label.
        unit: the unit of the values.
        guesses: the guesses that you wrote down, by the label of the bar; None: no guess.
    """
    import matplotlib.pyplot as plt

    guesses = {label: guess for label, guess in (guesses or {}).items() if guess is not None and label in values}
    figure, axes = plt.subplots(figsize=(7, 0.55 * len(values) + 1))
    places = range(len(values))
    bars = axes.barh(places, list(values.values()), color=COLOURS[0])
    axes.bar_label(bars, fmt="{:,.4g}" if max(values.values(), default=0) < 100 else "{:,.0f}", padding=4)
    for number, (label, guess) in enumerate(guesses.items()):
        place = list(values).index(label)
        line = axes.vlines(guess, place - 0.45, place + 0.45, colors="#D55E00", linestyles="dashed", linewidth=2)
        if number == 0:
            line.set_label("your guess")
    axes.set_yticks(places, list(values))
    axes.set_xlabel(unit)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    if guesses:
        axes.legend(loc="lower right")
    text = ", ".join(f"{label} {value:,.4g}" for label, value in values.items())
    said = ", ".join(f"{label} {guess:,.4g}" for label, guess in guesses.items())
    show_figure(figure, f"Bars, in {unit}: {text}" + (f"; you guessed {said}" if said else ""))


def show_timeline(runs: Mapping[str, dict]) -> None:
    """Draw when each rank of a pipeline computes which micro-batch, in one plot for each run.

    Args:
        runs: for the label of each run, the content of its timeline.json (``workshop.training.pipeline.report_timeline``).
    """
    import matplotlib.pyplot as plt

    ranks = max(rank for run in runs.values() for rank, *_ in run["timeline"]) + 1
    size = (7.5, (0.45 * ranks + 0.9) * len(runs) + 0.3)
    figure, rows = plt.subplots(len(runs), figsize=size, sharex=True, squeeze=False, layout="constrained")
    colours = {"forward": COLOURS[5], "backward": COLOURS[1]}
    for axes, (label, run) in zip(rows[:, 0], runs.items(), strict=True):
        named = set()
        for rank, kind, number, start, end in run["timeline"]:
            bar = (1e3 * start, 1e3 * (end - start))
            name = None if kind in named else kind
            axes.broken_barh([bar], (rank - 0.4, 0.8), color=colours[kind], edgecolor="white", label=name)
            axes.text(bar[0] + bar[1] / 2, rank, number, ha="center", va="center", fontsize=9)
            named.add(kind)
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.invert_yaxis()
        axes.set_title(f"{label}: bubble {run['bubble']:.0%}, by the formula {run['expected']:.0%}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1, 0].set_xlabel("milliseconds since the start of the step; the number is the micro-batch")
    figure.legend(*rows[0, 0].get_legend_handles_labels(), loc="outside right upper")
    show_figure(figure, "Timelines of a step: " + "; ".join(f"{label}, {_order(run)}" for label, run in runs.items()))


def _order(run: dict) -> str:
    """Say in which order each rank computes, for example "rank 0 computes F0 F1 B0 B1"."""
    order: dict[int, list[str]] = {}
    for rank, kind, number, *_ in sorted(run["timeline"], key=lambda event: event[3]):
        order.setdefault(rank, []).append(f"{kind[0].upper()}{number}")
    return ", ".join(f"rank {rank} computes {' '.join(each)}" for rank, each in sorted(order.items()))


def show_shares(runs: Mapping[str, Sequence[Sequence[float]]], what: str) -> None:
    """Draw how a whole divides into shares in each step, as areas on top of each other, in one plot for each run.

    Args:
        runs: for the label of each run and each step, the shares, which add up to 1.
        what: what has the shares, for example "expert".
    """
    import matplotlib.pyplot as plt

    figure, plots = plt.subplots(1, len(runs), figsize=(3.6 * len(runs), 3), sharey=True, squeeze=False)
    parts = []
    for axes, (label, steps) in zip(plots[0], runs.items(), strict=True):
        places = range(1, len(steps) + 1)
        colours = [COLOURS[number % len(COLOURS)] for number in range(len(steps[0]))]
        axes.stackplot(places, *zip(*steps, strict=True), colors=colours, edgecolor="white", linewidth=0.3)
        axes.set(xlabel="step", title=label, xlim=(1, len(steps)), ylim=(0, 1))
        middle = 0.0
        for number, share in enumerate(steps[-1]):
            if share > 0.04:
                axes.text(len(steps) + 0.02 * len(steps), middle + share / 2, number, va="center", fontsize=9)
            middle += share
        parts.append(
            f"{label}, the largest is {max(steps[0]):.0%} in the first and {max(steps[-1]):.0%} in the last step"
        )
    plots[0, 0].set_ylabel(f"share of each {what}")
    show_figure(figure, f"Shares of each {what}: " + "; ".join(parts))


def show_plot(
    x: str,
    y: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    points: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """Draw lines and points. An axis whose values differ by more than a factor of five is logarithmic; else it starts at zero.

    Args:
        x, y: the descriptions of the axes, with their units.
        lines: for each label, the places that a line connects.
        points: for each label, places that get a mark; a label that also has a line gets its colour.
    """
    import matplotlib.pyplot as plt

    points = points or {}
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    labels = list(dict.fromkeys([*lines, *points]))
    for number, label in enumerate(labels):
        style = {"color": COLOURS[number % len(COLOURS)], "label": label}
        if label in lines:
            axes.plot(*zip(*lines[label], strict=True), **style, linestyle="-" if number < 5 else "--")
            style.pop("label")
        if points.get(label):
            axes.scatter(*zip(*points[label], strict=True), **style, marker="osD^vP*X"[number % 8], s=28, zorder=3)
    places = [place for named in (lines, points) for several in named.values() for place in several]
    wide = [max(values) > 5 * min(values) > 0 for values in zip(*places, strict=True)]
    axes.set(xlabel=x, ylabel=y, xscale="log" if wide[0] else "linear", yscale="log" if wide[1] else "linear")
    if not wide[1]:
        axes.set_ylim(bottom=0)
    marked = sorted({place[0] for place in places})
    if len(marked) <= 8 and marked[-1] < 1e5:
        axes.set_xticks(marked, [f"{mark:,g}" for mark in marked], minor=False)
        axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=9) if len(labels) > 4 else axes.legend(fontsize=9)
    parts = [f"{label} from ({_place(line[0])}) to ({_place(line[-1])})" for label, line in lines.items() if line]
    parts += [f"{label}: {len(marks)} points" for label, marks in points.items()]
    show_figure(figure, f"{y} against {x}: " + "; ".join(parts))


def _place(place: tuple[float, float]) -> str:
    return ", ".join(f"{number:.3g}" for number in place)


def show_parts(bars: Mapping[str, Mapping[str, float]], unit: str) -> None:
    """Draw a bar for each label that is divided into named parts.

    Args:
        bars: for the label of each bar, its parts by their names.
        unit: the unit of the parts.
    """
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    figure, axes = plt.subplots(figsize=(7.5, 0.5 * len(bars) + 1.3), layout="constrained")
    left = [0.0] * len(bars)
    for number, name in enumerate(names):
        widths = [parts.get(name, 0.0) for parts in bars.values()]
        colour, hatch = COLOURS[number % len(COLOURS)], "//" if number >= len(COLOURS) else ""
        axes.barh(range(len(bars)), widths, left=left, color=colour, hatch=hatch, edgecolor="white", label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_xlabel(unit)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=9)
    text = "; ".join(
        f"{label}: " + ", ".join(f"{name} {value:.3g}" for name, value in parts.items())
        for label, parts in bars.items()
    )
    show_figure(figure, f"Bars of parts, in {unit}: {text}")


def show_which() -> None:
    """Show the page "Which should I use?": with your newest measurement, or else with the one from two CPU cores."""
    from IPython.display import Markdown, display

    own = [path for path in (ROOT / "runs").glob("**/which.md") if path.parent.name == "strategies"]
    newest = max(own, key=lambda path: path.stat().st_mtime, default=ROOT / "results" / "which-2-cores.md")
    display(Markdown(newest.read_text()))
