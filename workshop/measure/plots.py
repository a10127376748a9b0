"""Draw pictures that colour-blind people can read, with their own background for dark themes."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

# The palette of Okabe and Ito, which colour-blind people can distinguish: https://jfly.uni-koeln.de/color/
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")


def plot_runs(
    path: Path,
    curves: Mapping[str, Sequence[float]],
    throughput: Mapping[str, Mapping[int, float]],
    title: str,
    rate: str = "samples/s",
) -> None:
    """Draw the loss curves of several runs on one axis and, beside them, their throughput against the number of processes.

    Args:
        path: the PNG file to write.
        curves: for each run's label, the loss of each step.
        throughput: for each way of launching, samples per second by number of processes.
        title: the title of the picture.
        rate: the unit of the throughput.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws into files; needs no screen
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), facecolor="white", layout="constrained")
    figure.suptitle(title)
    # Equal curves coincide: earlier ones are wider, so that their edges remain visible.
    for index, (label, losses) in enumerate(curves.items()):
        width = 1.5 + 2.2 * (len(curves) - 1 - index)
        left.plot(range(1, len(losses) + 1), losses, label=label, color=COLOURS[index % len(COLOURS)], linewidth=width)
    left.set(xlabel="step", ylabel="loss (mean over the global batch)", title="Same global batches: one loss curve")
    if curves:
        left.legend()

    counts = sorted({count for series in throughput.values() for count in series})
    offsets = {name: index - (len(throughput) - 1) / 2 for index, name in enumerate(throughput)}
    width = 0.8 / max(len(throughput), 1)
    for index, (name, series) in enumerate(throughput.items()):
        places = [counts.index(count) + offsets[name] * width for count in series]
        bars = right.bar(places, list(series.values()), width * 0.92, label=name, color=COLOURS[index % len(COLOURS)])
        right.bar_label(bars, fmt="{:,.0f}", label_type="center", color="white", fontweight="bold", fontsize=9)
    base = next((series[1] for series in throughput.values() if 1 in series), None)
    comparable = len({name.partition("(")[2] for name in throughput}) == 1  # all on the same kind of device
    for place, count in enumerate(counts if base and comparable else []):
        ideal = right.hlines(base * count, place - 0.45, place + 0.45, colors="black", linestyles="dashed", linewidth=1)
        if place == 0:
            ideal.set_label("ideal: processes x one process")
    right.set_xticks(range(len(counts)), [f"{count} process{'es' * (count > 1)}" for count in counts])
    right.set(ylabel=f"{rate}, all processes together", title="Throughput")
    right.margins(y=0.25)
    if counts:
        right.legend(loc="upper left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_formats(path: Path, figures: Mapping) -> None:
    """Draw how fast images are read from each format, as medians of all rounds.

    Args:
        path: the PNG file to write.
        figures: the results of ``slurm-multinode/image_formats.py``: for each format, images per second of all rounds.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws into files; needs no screen
    import matplotlib.pyplot as plt

    formats = figures["formats"]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), facecolor="white", layout="constrained")
    figure.suptitle(f"{figures['images']:,} images in three formats, read in random order (medians of the rounds)")
    titles = {
        "bytes": "Reading alone, one process",
        "samples": f"Reading, decoding, cropping: DataLoader with {figures['workers']} workers",
    }
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        for index, (name, row) in enumerate(formats.items()):
            places = [group + (index - (len(formats) - 1) / 2) * 0.27 for group in range(2)]
            medians = [statistics.median(row[f"{what} from {state}"]) for state in ("disk", "memory")]
            bars = axes.bar(places, medians, 0.25, label=name, color=COLOURS[index])
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=9, padding=2)
        axes.set_xticks(range(2), ["from the disk", "again, from memory"])
        axes.set(title=title, ylabel="images/s")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    panels[0].legend(loc="upper left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_goodput(path: Path, figures: Mapping) -> None:
    """Draw the goodput of a training that is killed again and again against the steps between two checkpoints.

    Args:
        path: the PNG file to write.
        figures: the results of ``workshop.measure.goodput``.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws into files; needs no screen
    import matplotlib.pyplot as plt

    from workshop.plan.failures import goodput

    costs, rows = figures["costs"], figures["every"]
    figure, axes = plt.subplots(figsize=(8, 4.6), facecolor="white", layout="constrained")
    places = [int(every) for every in rows]
    means = [100 * row["goodput"] for row in rows.values()]
    all_runs = [[100 * run["goodput"] for run in row["runs"]] for row in rows.values()]
    low = [mean - min(runs) for mean, runs in zip(means, all_runs, strict=True)]
    high = [max(runs) - mean for mean, runs in zip(means, all_runs, strict=True)]
    label = "measured: mean, lowest and highest run"
    axes.errorbar(places, means, [low, high], fmt="o", color=COLOURS[0], capsize=4, label=label, zorder=3)
    model = {name: costs[name] for name in ("checkpoint", "restart")} | {"between": figures["between"]}
    line = [min(places) * (max(places) / min(places)) ** (index / 100) for index in range(101)]
    predicted = [100 * goodput(place * costs["step"], **model) for place in line]
    axes.plot(line, predicted, color=COLOURS[1], linewidth=2, label="Daly's model")
    for (name, best), style in zip(figures["best"].items(), ("--", ":"), strict=True):
        axes.axvline(best, color=COLOURS[2], linestyle=style, label=f"best interval, {name.title()}: {best:.0f} steps")
    between, step = figures["between"], 1e3 * costs["step"]
    axes.set(
        xlabel=f"steps between two checkpoints (a step takes {step:.0f} ms)",
        ylabel="goodput, % of the time",
        title=f"A training that is killed every {between:.1f} s on average",
        xscale="log",
    )
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
