"""Show a scaling study, samples per second by number of processes, as a table, a plot with the ideal line, CSV and JSON.

Strong scaling keeps the global batch and divides it among the processes. Weak scaling keeps the batch of each process. The
efficiency is the measured throughput divided by the ideal one, which is proportional to the number of processes and equal to the
measured one at the smallest number.
"""

import csv
import json
import statistics
from pathlib import Path

from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import open_folder, require_stages
from workshop.training.logs import read_log

MODES = {
    "strong": "the global batch stays",
    "weak": "the batch of each process stays",
    "scaling": "the logs do not say which batch stays",
}


def run_logs(files: list[str], output: str = "") -> int:
    """Show the same table and picture for the logs of runs with several numbers of processes, for example on several nodes.

    Args:
        files: the JSON files of train_at_scale.py (``--output``), or logs (.jsonl) that an EpochLog wrote. Several files with the
            same number of processes are repetitions, in this order.
        output: the folder for the results; "": runs/bench-logs in the repository.

    Raises:
        UserError: a file is missing or is not such a log, or the logs have different models or devices.
    """
    from rich.console import Console

    if not files:
        raise UserError("name the logs: workshop bench --logs runs/scale-*.json")
    runs = [read_run(Path(file)) for file in files]
    for key in ("model", "data", "image_size", "bf16", "compile", "device"):
        found = sorted({str(run.get(key)) for run in runs})
        if len(found) > 1:
            raise UserError(f"these logs cannot be compared: {key} is {' and '.join(found)}")
    rates, batches = {}, {}
    for run in sorted(runs, key=lambda run: run["processes"]):
        count, batch = run["processes"], run.get("batch_size", 0) * run.get("accumulate", 1)
        rates.setdefault(count, []).append(run["samples_per_second"])
        if batches.setdefault(count, batch) != batch:
            raise UserError(f"these logs of {count} processes have different batches: {batches[count]} and {batch}")
    if len(rates) < 2:
        raise UserError("all these logs have the same number of processes; a study needs at least two numbers")
    if 0 in batches.values():
        mode = "scaling"
    elif len(set(batches.values())) == 1:
        mode = "weak"
    elif len({count * batch for count, batch in batches.items()}) == 1:
        mode = "strong"
    else:
        raise UserError(
            "in these logs both the batch per process and the global batch differ, so they cannot be compared"
        )
    summary = {
        "machine": runs[0].get("machine"),
        "command": "workshop bench --logs " + " ".join(Path(file).name for file in files),
        "device": runs[0]["device"],
        "series": {mode: series(rates, batches)},
    }
    folder = open_folder(output or require_stages() / "runs" / "bench-logs")
    write_and_show(
        Console(highlight=False), folder, f"{runs[0].get('model', 'training')} ({runs[0]['device']})", summary
    )
    return 0


def read_run(file: Path) -> dict:
    """Return what a run has written: at least samples_per_second, processes and device.

    For an EpochLog: the median of its epochs without the first, which warms up (unless there is only one).

    Raises:
        UserError: the file is missing, or does not contain these values.
    """
    try:
        if file.suffix == ".jsonl":
            epochs = read_log(file)
            rates = [epoch["samples_per_second"] for epoch in epochs]
            run = {**epochs[-1], "samples_per_second": statistics.median(rates[1:] or rates)}
        else:
            run = json.loads(file.read_text())
        if run["device"] and run["processes"] > 0 and run["samples_per_second"] > 0:
            return run
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    raise UserError(f"{file} contains no samples/s of a training run")


def series(rates: dict[int, list[float]], batches: dict[int, int]) -> list[dict]:
    """Return a row for each number of processes.

    Args:
        rates: samples per second of each round, by number of processes in order.
        batches: the batch size of each process, by number of processes.
    """
    smallest = next(iter(rates))
    rows = []
    for count, values in rates.items():
        # Compare within a round, because other work on the machine slows both runs of a round down.
        efficiencies = [value * smallest / (base * count) for value, base in zip(values, rates[smallest], strict=False)]
        rows.append(
            {
                "processes": count,
                "batch_size": batches[count],
                "samples_per_second": statistics.median(values),
                "speedup": statistics.median(efficiencies) * count / smallest,
                "efficiency": statistics.median(efficiencies),
                "rates": values,
                "efficiencies": efficiencies,
            }
        )
    return rows


def write_and_show(console, folder: Path, title: str, summary: dict) -> None:
    """Print the table, and write bench.csv, bench.json and bench.png.

    Args:
        console: the rich console to print on.
        folder: the folder for the files.
        title: the title of the picture.
        summary: the content of bench.json; its "series" are the rows of ``series``, by kind of scaling.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    for column in ("scaling", "processes", "batch", "samples/s", "speed-up", "efficiency", "of the rounds"):
        table.add_column(column, justify="left" if column == "scaling" else "right", no_wrap=True)
    for mode, rows in summary["series"].items():
        for row in rows:
            table.add_row(
                mode,
                str(row["processes"]),
                str(row["batch_size"] or "?"),
                f"{row['samples_per_second']:,.0f}",
                f"{row['speedup']:.2f}",
                f"{row['efficiency']:.0%}",
                f"{min(row['efficiencies']):.0%} to {max(row['efficiencies']):.0%}",
            )
    console.print()
    console.print(table)
    console.print()
    for mode in summary["series"]:
        console.print(f"{mode}: {MODES[mode]}.", end=" ")
    console.print("Medians of the rounds.")
    every = [row["efficiencies"] for rows in summary["series"].values() for row in rows]
    if max(max(values) - min(values) for values in every) > 0.2:
        console.print(
            "The rounds differ by more than 20 %, because other programs use this machine; measure again when it is idle."
        )

    summary["picture"] = "bench.png"
    summary["alt_text"] = alt_text(summary)
    plot(folder / "bench.png", title, summary["series"])
    with open(folder / "bench.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["scaling", "processes", "batch_size", "round", "samples_per_second", "efficiency"])
        for mode, rows in summary["series"].items():
            for row in rows:
                for number, (rate, efficiency) in enumerate(
                    zip(row["rates"], row["efficiencies"], strict=False), start=1
                ):
                    writer.writerow(
                        [mode, row["processes"], row["batch_size"], number, f"{rate:.1f}", f"{efficiency:.4f}"]
                    )
    write_atomically(folder / "bench.json", json.dumps(summary, indent=1) + "\n")
    console.print(f"Picture and figures: {folder / 'bench.png'}, bench.csv, bench.json", soft_wrap=True)


def alt_text(summary: dict) -> str:
    """Return the picture in words."""
    sentences = []
    for mode, rows in summary["series"].items():
        points = ", ".join(
            f"{row['processes']}: {row['samples_per_second']:,.0f} ({row['efficiency']:.0%})" for row in rows
        )
        sentences.append(f"{mode}, {MODES[mode]}: {points}.")
    return "Samples per second (and efficiency) by number of processes. " + " ".join(sentences)


def plot(path: Path, title: str, every: dict[str, list[dict]]) -> None:
    """Draw samples/s against processes with the ideal line, strong and weak scaling side by side.

    Args:
        path: the PNG file to write.
        title: the title of the picture.
        every: the rows of ``series``, by kind of scaling.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws into files; needs no screen
    import matplotlib.pyplot as plt

    from workshop.measure.plots import COLOURS

    figure, all_axes = plt.subplots(
        1,
        len(every),
        figsize=(6 * len(every), 4.8),
        facecolor="white",
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    figure.suptitle(title)
    for index, (axes, (mode, rows)) in enumerate(zip(all_axes[0], every.items(), strict=True)):
        counts = [row["processes"] for row in rows]
        base = rows[0]["samples_per_second"]
        ideal = [base * count / counts[0] for count in counts]
        axes.plot(counts, ideal, color="black", linestyle="dashed", linewidth=1, label="ideal: nothing is lost")
        medians = [row["samples_per_second"] for row in rows]
        axes.plot(counts, medians, color=COLOURS[index], marker="o", linewidth=2, label="measured, median")
        for row in rows:
            places = [row["processes"]] * len(row["rates"])
            label = "each round" if row is rows[0] else None
            axes.scatter(places, row["rates"], color=COLOURS[index], s=14, alpha=0.6, label=label)
            if row is not rows[0]:
                axes.annotate(
                    f"{row['efficiency']:.0%} of ideal",
                    (row["processes"], row["samples_per_second"]),
                    xytext=(6, -6),
                    textcoords="offset points",
                    va="top",
                    fontweight="bold",
                )
        axes.set_xticks([count for count in counts if count > 0.03 * counts[-1]])  # closer labels would overlap
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlabel="processes", ylabel="samples/s, all processes together")
        axes.set_title(f"{mode}: {MODES[mode]}" if mode in MODES else mode)
        axes.margins(x=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left")
    all_axes[0][0].set_ylim(bottom=0)  # after drawing, because the panels share this axis
    figure.savefig(path, dpi=110)
    plt.close(figure)
