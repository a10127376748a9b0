"""``workshop bench``: how much faster a training script gets with more processes; and how fast they exchange data."""

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
from workshop.run.environment import environment, torchrun
from workshop.run.failures import first_failure
from workshop.run.machine import cores, gpus, machine
from workshop.run.processes import launch

if TYPE_CHECKING:
    from rich.console import Console

BATCH_SIZE = 128  # of one process, where the arguments name none


@dataclass(frozen=True)
class Study:
    """A script that is measured with several numbers of processes.

    Attributes:
        script: its path.
        result_option: the option that tells it where to write its figures.
        options: its further options, without the batch size.
        batch: the batch size of each process where the number of processes is the smallest.
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

        They are the same for every number of processes: with all cores to itself one process would be as fast as several on a
        CPU, and what is asked is what more devices bring. A process stands for a device.
        """
        return max(1, cores() // max(self.counts))

    def batch_size(self, mode: str, count: int) -> int:
        """The batch size of each of ``count`` processes."""
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
        script: one that torchrun starts, which takes ``--batch-size`` (on each process), and ``--checkpoint`` (it then writes an
            EpochLog beside it) or ``--output`` (JSON with ``samples_per_second``).
        arguments: its further options. The batch size among them is that of one process.
        processes: the numbers, separated by commas; "": 1, 2, 4, ... up to the GPUs, or the cores, of this machine.
        mode: "strong", "weak" or "both".
        repeats: how often each is run.
        output: the folder for bench.csv, bench.json and bench.png; "": runs/bench-SCRIPT in the repository.

    Returns:
        The exit status, 0.

    Raises:
        UserError: the script is unknown, does not take these options or fails, or the numbers do not go together.
    """
    from rich.console import Console

    root = require_stages()
    study = _study(script, arguments, processes, mode)
    folder = open_folder(output or root / "runs" / f"bench-{study.script.stem}")
    _check_options(study)
    console = Console(highlight=False)
    if int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) > 1:
        console.print(
            "This measures one node. For several, submit the job script with 1, 2, 4 nodes, then: bench --logs"
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
        processes: how many; "": one for each GPU, or 2 on the CPU.
        output: the folder for collectives.json; "": none is written.

    Raises:
        UserError: one process is too few, or they are more than the GPUs here.
    """
    count = process_counts(processes)[-1] if processes else max(2, gpus())
    if count < 2:
        raise UserError("--collectives takes two processes or more: --processes 2")
    command = [*torchrun(count), "-m", "workshop.measure.collectives"]
    if output:
        command.append(f"--output={open_folder(output) / 'collectives.json'}")
    variables = environment(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", 1))
    outcome = launch(command, variables, Path.cwd(), lambda line: print(line, end="", flush=True))
    return 1 if outcome.status is None else outcome.status


def _study(script: str | None, arguments: list[str], processes: str, mode: str) -> Study:
    """The study that the options of the command describe; the arguments are those of ``run_bench``.

    Raises:
        UserError: there is no such script, or the numbers do not go together.
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
    """The numbers of processes that ``text`` names, in order; "": 1, 2, 4, ... up to the GPUs, or the cores, of this machine.

    Raises:
        UserError: not all are whole numbers of at least 1, or they are more than the GPUs here.
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
            f"--processes {text}: {counts[-1]} processes would not fit on the {available} GPUs here and train on the CPU; "
            "CUDA_VISIBLE_DEVICES= (HIP_VISIBLE_DEVICES= on AMD) compares all on the CPU"
        )
    return counts


def split_batch_size(arguments: list[str]) -> tuple[int, list[str]]:
    """The batch size that the arguments name (else the default one), and the arguments without it.

    Raises:
        UserError: it is no whole number of at least 1.
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
            f"a study takes two numbers of processes or more, and here is only {counts[0]}: name them, --processes 1,2; with one "
            "GPU, CUDA_VISIBLE_DEVICES= (HIP_VISIBLE_DEVICES= on AMD) lets them train on the CPU"
        )
    for count in counts if "strong" in modes else []:
        if batch * counts[0] % count:
            raise UserError(
                f"strong scaling shares a global batch of {batch * counts[0]} among {count} processes, which leaves a remainder; "
                "choose another --batch-size (after --), other --processes, or --mode weak"
            )


def result_option(script: Path) -> str:
    """The option that tells a script where to leave its figures: "--checkpoint" or "--output".

    Raises:
        UserError: it has neither.
    """
    text = script.read_text(errors="replace")
    for option in ("--checkpoint", "--output"):
        if f'"{option}"' in text:
            return option
    raise UserError(f"{script.name} takes neither --checkpoint nor --output, so bench cannot find its samples/s")


def _check_options(study: Study) -> None:
    """Let a script of the workshop check its options for the largest number of processes, before any run."""
    if not re.search("check_arguments|PREFLIGHT", study.script.read_text(errors="replace")):
        return  # it would not end after the check
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
        For each mode and number of processes the samples per second of each run; and the device that the runs used.
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
        for number in range(repeats):  # all counts in each round, so that a noisy machine disturbs them alike
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
    """Run the script once, and return its samples/s and the device that it ran on."""
    shutil.rmtree(place, ignore_errors=True)  # a checkpoint of the run before would be carried on from
    place.mkdir(parents=True)
    result = place / ("run.pt" if study.result_option == "--checkpoint" else "run.json")
    options = [*study.options, f"--batch-size={study.batch_size(mode, count)}", f"{study.result_option}={result}"]
    variables = environment(OMP_NUM_THREADS=study.threads, PET_LOG_DIR=place / "torchrun")
    outcome = launch([*torchrun(count), str(study.script), *options], variables, Path.cwd(), lambda line: None)
    (place / "output.txt").write_text(outcome.output)
    if outcome.status != 0:
        reason = first_failure(outcome, place / "torchrun").strip().splitlines() or ["without a word"]
        rank = f"{reason[0]} " if reason[0].startswith("rank") else ""
        raise UserError(
            f"{study.script.name} failed with {count} processes: {rank}{reason[-1]} (all: {place / 'output.txt'})"
        )
    run = read_run(result if study.result_option == "--output" else result.with_suffix(".jsonl"))
    if run["processes"] != count:
        raise UserError(
            f"{study.script.name} trained with {run['processes']} processes where torchrun started {count}; "
            "bench takes scripts that torchrun starts, from stage 02's exercise 2 on"
        )
    return run["samples_per_second"], run["device"]
