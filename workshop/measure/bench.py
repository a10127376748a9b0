"""``workshop bench``: measure how a training script scales with the number of processes, and how fast they communicate."""

import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workshop.errors import UserError
from workshop.measure.scaling import read_run, series, write_and_show
from workshop.repository import open_folder, require_stages
from workshop.run.environment import environment, torchrun, why_hidden
from workshop.run.failures import first_failure
from workshop.run.machine import cores, gpus, machine
from workshop.run.processes import launch

if TYPE_CHECKING:
    from rich.console import Console

BATCH_SIZE = 128  # per process, unless the arguments give one


@dataclass(frozen=True)
class Study:
    """A script that is measured with several numbers of processes.

    Attributes:
        script: its path.
        result_option: the option that tells the script where to write its figures.
        options: its other options, without the batch size.
        batch: the batch size per process with the smallest number of processes.
        counts: the numbers of processes, in order.
        modes: "strong" (the same global batch for all numbers of processes), "weak" (the same batch in each process), or both.
    """

    script: Path
    result_option: str
    options: list[str]
    batch: int
    counts: list[int]
    modes: list[str]

    @property
    def plan(self) -> list[tuple[str, int]]:
        """The runs of a round: mode and number of processes."""
        return [(mode, count) for mode in self.modes for count in self.counts]

    @property
    def threads(self) -> int:
        """The threads of each process.

        They are the same for every number of processes, because each process represents one device. On a CPU, one process with
        all cores would be as fast as several, and the result would not show what more devices bring.
        """
        return max(1, cores() // max(self.counts))

    def batch_size(self, mode: str, count: int) -> int:
        """Return the batch size of each of ``count`` processes."""
        return self.batch * self.counts[0] // count if mode == "strong" else self.batch


def run_bench(
    script: str | None,
    arguments: list[str],
    processes: str = "",
    mode: str = "both",
    repeats: int = 3,
    output: str = "",
) -> int:
    """Measure a script with several numbers of processes on this machine; print a table, and write CSV, JSON and a plot.

    Args:
        script: a script that torchrun starts, which takes ``--batch-size`` (per process), and ``--checkpoint`` (it then writes an
            EpochLog beside it) or ``--output`` (JSON with ``samples_per_second``).
        arguments: its other options. A batch size among them is per process, with the smallest number of processes.
        processes: the numbers, separated by commas; "": 1, 2, 4, ... up to the number of GPUs, or of cores, of this machine.
        mode: "strong", "weak" or "both".
        repeats: the number of rounds.
        output: the folder for bench.csv, bench.json and bench.png; "": runs/bench-SCRIPT in the repository.

    Returns:
        The exit status, 0.

    Raises:
        UserError: the script is unknown, does not take these options or fails, or the numbers do not fit together.
    """
    from rich.console import Console

    root = require_stages()
    study = _study(script, arguments, processes, mode)
    folder = open_folder(output or root / "runs" / f"bench-{study.script.stem}")
    _check_options(study)
    console = Console(highlight=False)
    if int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) > 1:
        console.print(
            "This measures only one node. For several, submit the job script with 1, 2 and 4 nodes, then run bench --logs"
        )
    numbers = ", ".join(map(str, study.counts))
    threads = f"{study.threads} thread{'s' * (study.threads > 1)} each"
    console.print(f"{repeats} round{'s' * (repeats > 1)} of {numbers} processes, {threads}")
    rates, device = _measure_rounds(study, repeats, folder / "run", console)
    shown = os.path.relpath(study.script, root) if study.script.is_relative_to(root) else study.script.name
    summary = {
        "machine": machine(),
        "command": f"workshop bench {shown} --processes {','.join(map(str, study.counts))} --mode {mode} --repeats {repeats}"
        + (f" -- {' '.join(arguments)}" if arguments else ""),
        "device": device,
        "threads_of_each_process": study.threads,
        "series": {
            each: series(rates[each], {count: study.batch_size(each, count) for count in study.counts})
            for each in study.modes
        },
    }
    write_and_show(console, folder, f"{study.script.stem} on this machine ({device})", summary)
    return 0


def run_collectives(processes: str = "", output: str = "") -> int:
    """Measure the collectives between processes on this machine, and return the exit status.

    Args:
        processes: the number of processes; "": one per GPU, or 2 on the CPU.
        output: the folder for collectives.json; "": no file is written.

    Raises:
        UserError: there are fewer than two processes, or more processes than GPUs.
    """
    count = process_counts(processes)[-1] if processes else max(2, gpus())
    if count < 2:
        raise UserError("--collectives needs at least two processes: --processes 2")
    command = [*torchrun(count), "-m", "workshop.measure.collectives"]
    if output:
        command.append(f"--output={open_folder(output) / 'collectives.json'}")
    if hidden := why_hidden(count, gpus()):
        print(hidden, flush=True)
    variables = environment(gpus=not hidden, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", 1))
    outcome = launch(command, variables, Path.cwd(), lambda line: print(line, end="", flush=True))
    return 1 if outcome.status is None else outcome.status


def _study(script: str | None, arguments: list[str], processes: str, mode: str) -> Study:
    """Return the study that the options of the command describe; the arguments are those of ``run_bench``.

    Raises:
        UserError: there is no such script, or the numbers do not fit together.
    """
    if not script:
        raise UserError("name a training script: workshop bench slurm-multinode/train_at_scale.py; or --collectives")
    path = Path(script).absolute()
    if not path.is_file():
        raise UserError(f"{script}: no such file")
    counts = process_counts(processes)
    modes = ["strong", "weak"] if mode == "both" else [mode]
    batch, options = split_batch_size(arguments)
    _check_counts(counts, modes, batch)
    return Study(path, result_option(path), options, batch, counts, modes)


def process_counts(text: str) -> list[int]:
    """Return the numbers of processes in ``text``, in order; "": 1, 2, 4, ... up to the GPUs, or the cores, of this machine.

    Raises:
        UserError: not all are whole numbers of at least 1, or there are more processes than GPUs.
    """
    available = gpus()
    if not text:
        largest = available or cores()
        return sorted({min(2**power, largest) for power in range(math.ceil(math.log2(largest)) + 1)})
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise UserError(f"--processes {text}: give whole numbers of at least 1, separated by commas")
    if available and counts[-1] > available:
        raise UserError(
            f"--processes {text}: {counts[-1]} processes do not fit on {available} GPUs, and NCCL refuses two on one GPU; "
            "to compare all numbers on the CPU, set CUDA_VISIBLE_DEVICES= (HIP_VISIBLE_DEVICES= on AMD)"
        )
    return counts


def split_batch_size(arguments: list[str]) -> tuple[int, list[str]]:
    """Return the batch size in the arguments (else the default), and the arguments without it.

    Raises:
        UserError: it is not a whole number of at least 1.
    """
    rest, text = [], str(BATCH_SIZE)
    words = iter(arguments)
    for word in words:
        if word == "--batch-size":
            text = next(words, "")
        elif word.startswith("--batch-size="):
            text = word.partition("=")[2]
        else:
            rest.append(word)
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--batch-size: '{text}' is not a whole number of at least 1")
    return int(text), rest


def _check_counts(counts: list[int], modes: list[str], batch: int) -> None:
    if len(counts) < 2:
        raise UserError(
            f"a study needs at least two numbers of processes, but there is only {counts[0]}: name them, --processes 1,2; with "
            "one GPU, set CUDA_VISIBLE_DEVICES= (HIP_VISIBLE_DEVICES= on AMD) to train on the CPU"
        )
    for count in counts if "strong" in modes else []:
        if batch * counts[0] % count:
            raise UserError(
                f"strong scaling divides a global batch of {batch * counts[0]} among {count} processes, which leaves a "
                "remainder; choose a different --batch-size (after --), different --processes, or --mode weak"
            )


def result_option(script: Path) -> str:
    """Return the option that tells a script where to write its figures: "--checkpoint" or "--output".

    Raises:
        UserError: the script has neither.
    """
    text = script.read_text(errors="replace")
    for option in ("--checkpoint", "--output"):
        if f'"{option}"' in text:
            return option
    raise UserError(f"{script.name} takes neither --checkpoint nor --output, so bench cannot find its samples/s")


def _check_options(study: Study) -> None:
    """Let a script of the workshop check its options for the largest number of processes, before any run."""
    if not re.search("check_arguments|PREFLIGHT", study.script.read_text(errors="replace")):
        return  # this script would not end after the check
    count = study.counts[-1]
    for mode in sorted(study.modes):
        size = f"--batch-size={study.batch_size(mode, count)}"
        done = subprocess.run(
            [sys.executable, "-P", "-m", "workshop.training.preflight", study.script, *study.options, size],
            env=environment(OMP_NUM_THREADS=study.threads, NPROC=count),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            raise UserError(f"with {count} processes: {(done.stderr.splitlines() or ['it cannot start'])[-1]}")


def _measure_rounds(study: Study, repeats: int, place: Path, console: "Console") -> tuple[dict, str]:
    """Run the script ``repeats`` times with each number of processes.

    Returns:
        The samples per second of each run, by mode and number of processes, and the device that the runs used.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rates: dict[str, dict[int, list[float]]] = {mode: {count: [] for count in study.counts} for mode in study.modes}
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=repeats * len(study.plan))
        for number in range(repeats):  # all counts in each round, so that other work on the machine affects all
            for mode, count in study.plan:
                progress.update(bar, description=f"{mode}, {count} process{'es' * (count > 1)}")
                if mode == "weak" and "strong" in study.modes and count == study.counts[0]:
                    rate = rates["strong"][count][number]  # the same run
                else:
                    rate, device = _measure(study, mode, count, place)
                rates[mode][count].append(rate)
                progress.advance(bar)
    shutil.rmtree(place, ignore_errors=True)
    return rates, device


def _measure(study: Study, mode: str, count: int, place: Path) -> tuple[float, str]:
    """Run the script once, and return its samples per second and its device."""
    shutil.rmtree(place, ignore_errors=True)  # otherwise the script would resume from an old checkpoint
    place.mkdir(parents=True)
    result = place / ("run.pt" if study.result_option == "--checkpoint" else "run.json")
    options = [*study.options, f"--batch-size={study.batch_size(mode, count)}", f"{study.result_option}={result}"]
    variables = environment(OMP_NUM_THREADS=study.threads, PET_LOG_DIR=place / "torchrun")
    outcome = launch([*torchrun(count), str(study.script), *options], variables, Path.cwd(), lambda line: None)
    (place / "output.txt").write_text(outcome.output)
    if outcome.status != 0:
        reason = first_failure(outcome, place / "torchrun").strip().splitlines() or ["no error message"]
        rank = f"{reason[0]} " if reason[0].startswith("rank") else ""
        raise UserError(
            f"{study.script.name} failed with {count} processes: {rank}{reason[-1]} (full output: {place / 'output.txt'})"
        )
    run = read_run(result if study.result_option == "--output" else result.with_suffix(".jsonl"))
    if run["processes"] != count:
        raise UserError(
            f"{study.script.name} trained with {run['processes']} processes, although torchrun started {count}; "
            "bench needs a script for torchrun, such as exercise 2 of stage 02 or a later one"
        )
    return run["samples_per_second"], run["device"]
