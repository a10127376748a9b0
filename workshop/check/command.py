"""The command ``workshop check``: one check, or one at every save."""

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from workshop.check.exercises import EXERCISES, find_exercise
from workshop.check.judge import Verdict, check_file
from workshop.check.learning import resolve_exercise
from workshop.check.progress import next_exercise, record_check
from workshop.check.report import as_json, short, show
from workshop.errors import UserError
from workshop.repository import ROOT, workshop_command


def run_check(
    file: str | None,
    *,
    launch: str,
    nproc: int,
    device: str,
    arguments: list[str],
    json: bool,
    watch: bool,
    verbose: bool,
) -> int:
    """Check a program and return the exit status: 0 if no error was found, 1 otherwise.

    Args:
        file: the program; None: the next exercise that is not done.
        launch: how a program that is no exercise is started.
        nproc: the number of processes.
        device: "cpu", or "auto": GPUs where there are as many as processes.
        arguments: options for a program that is no exercise.
        json: print JSON in place of words.
        watch: check again whenever the file is saved, until interrupted.
        verbose: print tracebacks and stacks.

    Raises:
        UserError: the file cannot be checked.
    """
    path = _find(file)
    console = Console(highlight=False)
    exercise = find_exercise(path)
    single = (launch or (exercise.launch if exercise else "")) == "single"
    on_cpu = device == "cpu" or _devices() < (1 if single else nproc)
    options = {"launch": launch, "nproc": nproc, "on_cpu": on_cpu, "arguments": arguments}
    if watch:
        return _watch(path, options, console, verbose)
    verdict = None
    said = None
    for verdict in check_file(path, **options):
        if not json:
            show(verdict, console, verbose, said)
        said = verdict.states()
    if json:
        print(as_json(verdict))
    _record(verdict)
    in_a_notebook = os.environ.get("WORKSHOP_NOTEBOOK")
    if not json and not in_a_notebook and not verdict.errors and verdict.exercise and not verdict.unchecked:
        following = next_exercise()
        if following:
            console.print(f"next: {workshop_command()} check {short(following.path)}")
    return 1 if verdict.errors else 0


def _find(file: str | None) -> Path:
    if file is None:
        exercise = next_exercise()
        if exercise is None:
            raise UserError("all exercises are done; name a FILE to check it again")
        return exercise.path
    path = Path(file).expanduser()
    if not path.exists() and (ROOT / path).exists():
        path = ROOT / path  # as the README writes it, from another folder
    for exercise in EXERCISES:
        if path.name in exercise.beside:
            return path.with_name(exercise.path.name)
    if path.exists() or path.suffix or os.sep in file:
        return path
    return resolve_exercise(file).path


def _record(verdict: Verdict) -> None:
    if verdict.exercise and verdict.file == verdict.exercise.path.resolve():
        record_check(
            verdict.exercise.name, {goal: state in ("met", "unjudged") for goal, state in verdict.states().items()}
        )


def _devices() -> int:
    """How many GPUs there are; asked in another process, because one that has asked cannot fork programs that use them."""
    if not any(os.path.exists(place) for place in ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")):
        return 0
    code = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout.strip() or 0)


def _watch(path: Path, options: dict, console: Console, verbose: bool) -> int:
    """Check at every save; what needs a real launcher is left to a check without --watch."""
    seen = None
    while True:
        stamp = _stamp(path)
        if stamp != seen:
            seen = stamp
            console.clear()
            try:
                for verdict in check_file(path, quick=True, **options):
                    show(verdict, console, verbose)
                    if not verdict.errors and verdict.exercise:
                        console.print("[dim]the goals that need a real launcher: check once without --watch[/]")
            except UserError as error:
                console.print(f"[red]{error}[/]", markup=True)
            console.print("[dim]watching; Ctrl-C ends it[/]")
        time.sleep(0.2)


def _stamp(path: Path) -> tuple:
    exercise = find_exercise(path) if path.exists() else None
    files = [path, *(path.with_name(own.name) for own, _ in exercise.pairs[1:])] if exercise else [path]
    return tuple((file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else None for file in files)
