"""The command ``workshop check``: one check, or one at every save."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypedDict

from rich.console import Console

from workshop.check.report import as_json, short, show
from workshop.check.verdict import Verdict
from workshop.course.checking import check_file
from workshop.course.exercises import find_exercise
from workshop.course.learning import resolve_exercise
from workshop.course.progress import next_exercise, record_check
from workshop.errors import UserError
from workshop.repository import ROOT, require_stages, workshop_command


class Options(TypedDict):
    """The options of ``check_file`` that the command line sets."""

    launch: str
    nproc: int
    on_cpu: bool
    arguments: Sequence[str]


def run_check(
    file: str | None,
    *,
    launch: str,
    nproc: int,
    device: str,
    arguments: Sequence[str],
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
    options = Options(launch=launch, nproc=nproc, on_cpu=on_cpu, arguments=arguments)
    if watch:
        _watch(path, options, console, verbose)
    shown = None
    for verdict in check_file(path, **options):
        if not json:
            shown = show(verdict, console, verbose, shown)
    if json:
        print(as_json(verdict))
    _record(verdict)
    in_a_notebook = os.environ.get("WORKSHOP_NOTEBOOK")
    if not json and not in_a_notebook and verdict.subject.goals and not verdict.errors and not verdict.unchecked:
        following = next_exercise()
        if following:
            console.print(f"next: {workshop_command()} check {short(following.path)}")
    return 1 if verdict.errors else 0


def _find(file: str | None) -> Path:
    """The program or job script that is meant: of an exercise also where another file of it is named."""
    if file is None:
        require_stages()
        exercise = next_exercise()
        if exercise is None:
            raise UserError("all exercises are done; name a FILE to check it again")
        return exercise.path
    path = Path(file).expanduser()
    if not path.exists() and (ROOT / path).exists():
        path = ROOT / path  # as the README writes it, from another folder
    if not (path.exists() or path.suffix or os.sep in file):
        return resolve_exercise(file).path
    exercise = find_exercise(path)
    return path.with_name(exercise.file) if exercise else path


def _record(verdict: Verdict) -> None:
    """Remember which goals are met, if it is the learner's own file that was checked."""
    if verdict.subject.name and verdict.subject.file == (ROOT / verdict.subject.name).resolve():
        states = verdict.states()
        record_check(verdict.subject.name, {goal: state in ("met", "unjudged") for goal, state in states.items()})


def _devices() -> int:
    """How many GPUs there are; asked in another process, because one that has asked cannot fork programs that use them."""
    if not any(os.path.exists(place) for place in ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")):
        return 0
    code = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout.strip() or 0)


def _watch(path: Path, options: Options, console: Console, verbose: bool) -> NoReturn:
    """Check at every save, until interrupted; what needs a real launcher is left to a check without --watch."""
    seen = None
    while True:
        stamp = _stamp(path)
        if stamp != seen:
            seen = stamp
            console.clear()
            try:
                for verdict in check_file(path, quick=True, **options):
                    show(verdict, console, verbose)
                    if "waiting" in verdict.states().values():
                        console.print("[dim]for the goals that are not checked yet: check once without --watch[/]")
            except UserError as error:
                console.print(f"[red]{error}[/]", markup=True)
            console.print("[dim]watching; Ctrl-C ends it[/]")
        time.sleep(0.2)


def _stamp(path: Path) -> list[tuple[int, int] | None]:
    """What changes when the file, or another one of its exercise, is saved."""
    exercise = find_exercise(path)
    files = [path, *(path.with_name(own.name) for own, _ in exercise.pairs[1:])] if exercise else [path]
    return [(file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else None for file in files]
