"""Draw the timelines of all strategies that ``workshop strategies`` has run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from workshop.measure.plots import COLOURS

# Computations are at the top of the row of a rank, its communication is below them. A rank often sends and receives at once.
COLOUR = {
    "forward": COLOURS[5],
    "backward": COLOURS[1],
    "optimizer": COLOURS[2],
    "other": "#999999",
    "all_reduce": COLOURS[4],
    "all_gather": COLOURS[0],
    "reduce_scatter": COLOURS[3],
    "broadcast": COLOURS[6],
    "all_to_all": "#666666",
    "send": COLOURS[7],
    "receive": "#BBBBBB",
}
COMPUTING = ("forward", "backward", "optimizer", "other")
PLACES = {"send": (0.05, 0.15), "receive": (0.25, 0.15)} | dict.fromkeys(COMPUTING, (-0.4, 0.4))  # offset and height
LABELS = {"other": "other computation"}
Timelines = Sequence[Sequence[tuple[str, float, float]]]  # for each rank: what, start and end in milliseconds


def draw_timelines(path: Path, timelines: Mapping[str, Timelines], shares: Mapping[str, float], title: str) -> None:
    """Draw one step of each strategy: a row for each rank, in milliseconds since the start of the step.

    Args:
        path: the PNG file to write.
        timelines: for each strategy, what its ranks did (``workshop.training.timeline``).
        shares: for each strategy, the share of the step in which a rank computes.
        title: the title of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws into files without a screen
    import matplotlib.pyplot as plt

    heights = [0.42 * len(ranks) + 0.3 for ranks in timelines.values()]
    figure, rows = plt.subplots(
        len(timelines),
        figsize=(13, sum(heights) + 1.6),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
        facecolor="white",
        layout="constrained",
    )
    figure.suptitle(title)
    named = {}
    for axes, (name, ranks) in zip(rows[:, 0], timelines.items(), strict=True):
        for rank, pieces in enumerate(ranks):
            for kind, colour in COLOUR.items():
                bars = [(start, end - start) for what, start, end in pieces if what == kind]
                offset, height = PLACES.get(kind, (0.05, 0.35))
                if bars:
                    named[kind] = axes.broken_barh(bars, (rank + offset, height), color=colour)
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], fontsize=8)
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_title(f"{name}: a rank computes {shares[name]:.0%} of the step", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1, 0].set_xlabel(
        "milliseconds since the start of the step; at the top of a row computation, below it communication"
    )
    shown = [kind for kind in COLOUR if kind in named]
    labels = [LABELS.get(kind, kind.replace("_", "-")) for kind in shown]
    figure.legend([named[kind] for kind in shown], labels, loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
