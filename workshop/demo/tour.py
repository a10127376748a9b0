"""Run ``workshop tour``: train the solutions of the stages for a short time, and compare them in a table and a picture."""

import importlib
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from workshop.course.exercises import TourRow, stage_files
from workshop.demo.strategies import run_strategies
from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import open_folder, require_stages
from workshop.run.environment import environment, torchrun, why_hidden
from workshop.run.failures import first_failure
from workshop.run.machine import cores, gpus, machine
from workshop.run.processes import launch
from workshop.training.finetuning import read_training
from workshop.training.logs import read_log

if TYPE_CHECKING:
    from rich.console import Console

GLOBAL_BATCH = 128


@dataclass(frozen=True)
class Entry:
    """A program of a stage that the tour runs.

    Attributes:
        stage: the stage's number, as in ``--stages``.
        name: its name in the table.
        command: returns the command, without the training options, for a number of processes.
        scales: whether it can run with several processes.
        language: whether it trains the small language model of stage 04, and not on images.
    """

    stage: str
    name: str
    command: Callable[[int], list[str]]
    scales: bool = True
    language: bool = False


def entries() -> list[Entry]:
    """Return the programs that the ``exercises.toml`` files list under ``[[tour]]``, in the order of the course.

    Raises:
        UserError: one of these files is wrong.
    """
    return [
        Entry(
            stage.partition("_")[0],
            row.name,
            partial(_command, row),
            scales=row.torchrun or bool(row.processes_option),
            language=row.language,
        )
        for stage, file in stage_files().items()
        for row in file.tour
    ]


def _command(row: TourRow, processes: int) -> list[str]:
    if row.torchrun:
        return [*torchrun(processes), row.program]
    option = [f"{row.processes_option}={processes}"] if row.processes_option else []
    return [sys.executable, row.program, *option]


EVERY_STRATEGY = "05"  # with this stage, the tour also runs ``workshop strategies``
STEPS = 10  # of the language model per epoch of the images
SEQUENCES = 8  # the minimum global batch of the language model


def run_tour(stages: str = "", epochs: int = 3, output: str | None = None) -> int:
    """Run the tour and return its exit status: 0 if every run trained, else 1.

    Args:
        stages: the numbers of the stages, separated by commas; "" for all. Stage 05 runs ``workshop strategies``.
        epochs: passes over the training set in each run.
        output: the folder for tour.json, tour.png and the checkpoints and logs of the runs; None for runs/tour in the repository.
            The results of stage 05 are in its subfolder strategies.

    Raises:
        UserError: a stage is unknown, or the folder cannot be written.
    """
    from rich.console import Console

    root = require_stages()
    chosen = _chosen(stages)
    rows = [entry for entry in entries() if entry.stage in chosen]
    folder = open_folder(output or root / "runs" / "tour", without="tour.json")
    console = Console()
    status = _run_entries(rows, epochs, root, folder, console) if rows else 0
    if EVERY_STRATEGY in chosen:
        processes = max(number for number in (2, 4, 8) if number <= max(2, process_counts()[-1] if gpus() else 2))
        console.print()
        status = run_strategies(processes=processes, output=str(folder / "strategies")) or status
    return status


def _run_entries(entries: list[Entry], epochs: int, root: Path, folder: Path, console: "Console") -> int:
    """Run the programs, and print and write the results; return 0 if every program trained, else 1."""
    counts = process_counts()
    plan = [(entry, count) for entry in entries for count in (counts if entry.scales else [1])]
    batches = {language: _global_batch(language, counts) for language in (False, True)}
    for language, what in (
        (False, f"{epochs} epochs on the digits"),
        (True, f"{STEPS * epochs} steps of a language model"),
    ):
        number = sum(entry.language == language for entry, _ in plan)
        if number:
            size = batches[language]
            console.print(f"{number} runs of {what}, each with global batches of {size}", highlight=False)

    if hidden := why_hidden(max(count for _, count in plan), gpus()):
        console.print(hidden, highlight=False)
    start = time.monotonic()
    # The first import of matplotlib on a machine takes seconds, because it searches for fonts. It runs beside the first program,
    # which uses only one core.
    threading.Thread(target=importlib.import_module, args=["matplotlib.pyplot"], daemon=True).start()
    results = _run_plan(plan, batches, epochs, root, folder, console)
    _add_speedups(results)
    summary = {
        "machine": machine(),
        "command": "workshop " + " ".join(sys.argv[1:]),
        "epochs": epochs,
        "global_batch": batches[False],
        "seconds": time.monotonic() - start,
        "peak_memory": max(result["peak_memory"] for result in results),
        "largest_difference_between_loss_curves": _largest_difference(_images(results)),
        "largest_difference_between_loss_curves_of_the_language_model": _largest_difference(_language(results)),
        "runs": results,
    }
    _write(folder, summary)
    _show(console, folder, summary)
    return 1 if any(result["failure"] for result in results) else 0


def _run_plan(
    plan: list[tuple[Entry, int]], batches: dict[bool, int], epochs: int, root: Path, folder: Path, console: "Console"
) -> list[dict]:
    """Run each program with its number of processes and a progress bar; return the results of ``_run``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    results = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        bars = [
            progress.add_task(
                _label(entry.name, count),
                total=epochs * (STEPS if entry.language else 1),
                start=False,
                note="",
                unit="steps" if entry.language else "epochs",
            )
            for entry, count in plan
        ]
        for bar, (entry, count) in zip(bars, plan, strict=True):
            progress.start_task(bar)

            def note_epoch(line, bar=bar):
                if match := re.match(r"(?:epoch|step) (\d+)/", line):
                    progress.update(bar, completed=int(match[1]))

            result = _run(entry, count, batches[entry.language], epochs, root, folder, note_epoch)
            results.append(result)
            progress.stop_task(bar)
            progress.update(bar, note="[bold red]failed" if result["failure"] else f"{result['seconds']:.1f} s")
    return results


def _global_batch(language: bool, counts: list[int]) -> int:
    """Return the smallest global batch that is large enough and that every number of processes divides."""
    multiple = math.lcm(*counts)
    return multiple * math.ceil((SEQUENCES if language else GLOBAL_BATCH) / multiple)


def _images(results: list[dict]) -> list[dict]:
    return [result for result in results if not result["language"]]


def _language(results: list[dict]) -> list[dict]:
    return [result for result in results if result["language"]]


def _chosen(stages: str) -> list[str]:
    known = sorted({entry.stage for entry in entries()} | {EVERY_STRATEGY})
    wanted = [stage.strip() for stage in stages.split(",") if stage.strip()] or known
    for stage in wanted:
        if stage not in known:
            raise UserError(f"--stages {stages}: there is no stage '{stage}'; choose from: {', '.join(known)}")
    return wanted


def process_counts() -> list[int]:
    """Return 1, 2, 4, ... up to the number of accelerators; on the CPU up to the number of cores, but at least 2, at most 4."""
    accelerators = gpus()
    largest = accelerators if accelerators > 1 else max(2, min(4, cores()))
    return sorted({min(2**power, largest) for power in range(math.ceil(math.log2(largest)) + 1)})


def _label(name: str, processes: int) -> str:
    return name if name == "single process" else f"{name}, {processes} process{'es' * (processes > 1)}"


def _run(entry: Entry, processes: int, batch: int, epochs: int, root: Path, folder: Path, on_line) -> dict:
    place = folder / f"{entry.stage}-{entry.name.replace(' ', '-').replace('.', '-')}-{processes}"
    shutil.rmtree(place, ignore_errors=True)  # otherwise the run would resume from the checkpoint of an earlier tour
    place.mkdir()
    checkpoint = place / "checkpoint.ckpt"  # the extension that Lightning uses
    length = [f"--steps={STEPS * epochs}", f"--folder={place}"]
    if not entry.language:
        length = [f"--epochs={epochs}", f"--checkpoint={checkpoint}"]
    command = [*entry.command(processes), *length, f"--batch-size={batch // processes}"]
    # One thread per process, so that on a CPU a process stands for a device, and more processes for more devices.
    # The temporary folder needs a short path, because the path of a socket that processes create there has at most 107 bytes.
    with tempfile.TemporaryDirectory() as temporary:
        visible = not why_hidden(processes, gpus())
        variables = environment(gpus=visible, OMP_NUM_THREADS=1, PET_LOG_DIR=place / "torchrun", TMPDIR=temporary)
        outcome = launch(command, variables, root, on_line)
        failure = first_failure(outcome, place / "torchrun", Path(temporary)) if outcome.status != 0 else ""
    (place / "output.txt").write_text(outcome.output)

    result = {
        "stage": entry.stage,
        "name": entry.name,
        "language": entry.language,
        "processes": processes,
        "seconds": outcome.seconds,
        "peak_memory": outcome.peak_memory,
    }
    if entry.language:
        run = read_training(place)
        if not failure and len(run.losses) != STEPS * epochs:
            failure = f"it ended without error, but took {len(run.losses)} of {STEPS * epochs} steps\n{outcome.output}"
        rates = [report["tokens_per_second"] for report in run.entries if "tokens_per_second" in report]
        result |= {"device": run.device, "losses": run.losses}
        result |= {"validation_loss": run.validation[-1] if run.entries else None}
    else:
        log = read_log(checkpoint)
        if not failure and (len(log) != epochs or not checkpoint.exists()):
            failure = f"it ended without error, but trained {len(log)} of {epochs} epochs\n{outcome.output}"
        rates = [epoch["samples_per_second"] for epoch in log]
        result |= {"device": log[0]["device"] if log else "", "accuracy": log[-1]["accuracy"] if log else None}
        result |= {"losses": [loss for epoch in log for loss in epoch["losses"]]}
    rates = rates[1:] or rates  # the first rate includes the warm-up
    return result | {"samples_per_second": statistics.median(rates) if rates else None, "failure": failure}


def _add_speedups(results: list[dict]) -> None:
    """Add to each result its speed-up over the first run with one process on the same kind of device, or None."""
    base: dict[tuple, float] = {}
    for result in results:
        rate, device = result["samples_per_second"], (result["language"], result["device"])
        if rate and result["processes"] == 1 and not result["failure"]:
            base.setdefault(device, rate)
        result["speedup"] = rate / base[device] if rate and device in base else None


def _largest_difference(results: list[dict]) -> float | None:
    curves = [result["losses"] for result in results if not result["failure"]]
    if len(curves) < 2:
        return None
    return max(max(step) - min(step) for step in zip(*curves, strict=True))


def _write(folder: Path, summary: dict) -> None:
    for name, runs, rate in (
        ("tour.png", _images(summary["runs"]), "samples/s"),
        ("tour-language.png", _language(summary["runs"]), "tokens/s"),
    ):
        if runs:
            _draw(folder / name, runs, rate, summary["machine"]["torch"])
    write_atomically(folder / "tour.json", json.dumps(summary, indent=1))


def _draw(path: Path, runs: list[dict], rate: str, version: str) -> None:
    from workshop.measure.plots import plot_runs

    trained = [result for result in runs if not result["failure"]]
    devices = sorted({result["device"] for result in trained})
    curves, throughput = {}, {}
    for result in trained:
        # With one GPU, several processes train on the CPU: a different device, so they form a separate series.
        note = f" ({result['device']})" if len(devices) > 1 else ""
        curves[_label(result["name"], result["processes"]) + note] = result["losses"]
        throughput.setdefault(result["name"] + note, {})[result["processes"]] = result["samples_per_second"]
    where = " and ".join(devices) or "no run succeeded"
    plot_runs(path, curves, throughput, f"The tour on this machine ({where}, torch {version})", rate)


def _table(runs: list[dict], rate: str, metric: str):
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")  # fits into 80 columns
    for column, justify in (
        ("stage", "left"),
        ("run", "left"),
        ("processes", "right"),
        ("device", "left"),
        (rate, "right"),
        ("speed-up", "right"),
        (metric, "right"),
        ("seconds", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)
    for result in runs:
        if result["failure"]:
            figures = ["[bold red]failed", "", "", ""]
        else:
            figures = [
                result["device"],
                f"{result['samples_per_second']:,.0f}",
                f"{result['speedup']:.2f}" if result["speedup"] else "",
                f"{result['validation_loss']:.3f}" if result["language"] else f"{result['accuracy']:.2%}",
            ]
        table.add_row(result["stage"], result["name"], str(result["processes"]), *figures, f"{result['seconds']:.1f}")
    return table


def _show(console, folder: Path, summary: dict) -> None:
    for runs, rate, metric in (
        (_images(summary["runs"]), "samples/s", "accuracy"),
        (_language(summary["runs"]), "tokens/s", "loss"),
    ):
        if runs:
            console.print()
            console.print(_table(runs, rate, metric))
    console.print()
    for result in summary["runs"]:
        if result["failure"]:
            console.print(f"[bold red]{_label(result['name'], result['processes'])} failed:", highlight=False)
            console.print(result["failure"], markup=False, highlight=False, soft_wrap=True)
    differences = [
        value for name, value in summary.items() if name.startswith("largest_difference") and value is not None
    ]
    difference = " and ".join(f"{value:.1e}" for value in differences) if differences else None
    devices = {result["device"] for result in summary["runs"] if not result["failure"]}
    if difference is not None:
        reason = "only the rounding differs (the order of float32 sums, and bfloat16 in the language model)"
        if devices != {"cpu"}:
            reason = "the rounding differs (GPUs may round convolutions to TF32, and the order of sums varies)"
        console.print(
            f"The loss curves differ by at most {difference}, because every run uses the same global batches, and {reason}. "
            "Rounding errors grow with each step, but AdamW keeps them small here.",
            highlight=False,
        )
    if "cpu" in devices:
        console.print("On the CPU each process uses one thread, so it stands for a device.", highlight=False)
    if len(devices) > 1:
        console.print("Compare the runs on the CPU (more processes than GPUs) only with each other.", highlight=False)
    console.print(
        f"{summary['seconds']:.0f} s, at most {summary['peak_memory'] / 2**30:.1f} GiB of memory. "
        f"Picture and figures: {folder / 'tour.png'}, tour.json",
        highlight=False,
        soft_wrap=True,
    )
