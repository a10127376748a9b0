"""Run ``workshop check``: check a file once, or again whenever it is saved."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from workshop.check.command import hides_gpus, run_command
from workshop.check.report import short, show, show_all
from workshop.check.reports import write_reports
from workshop.check.settings import read_settings
from workshop.check.start import READERS
from workshop.check.verdict import Verdict
from workshop.course.checking import check_file
from workshop.course.exercises import find_exercise
from workshop.course.learning import resolve_exercise
from workshop.course.progress import next_exercise, record_check, sharing_path
from workshop.course.sharing import share
from workshop.errors import UserError
from workshop.repository import ROOT, require_stages, workshop_command


def run_check(words: Sequence[str], *, watch: bool, nproc: int, device: str, **chosen: Any) -> int:
    """Check a program and return the exit status: 0 if no error was found, 1 otherwise, 2 if nothing could be judged.

    Args:
        words: the file of an exercise, or the command that starts a program; empty: the command in pyproject.toml, or else
            the first exercise that is not done.
        watch: check again whenever the file is saved, until interrupted.
        nproc: the number of processes of an exercise.
        device: "cpu", or "auto": use GPUs if there is one per process.
        chosen: the other options of ``run_command``.

    Raises:
        UserError: the file cannot be checked.
    """
    if is_command(words) or (not words and read_settings(Path.cwd()).command):
        return run_command(words, device=device, module="workshop", **chosen)
    if len(words) > 1:
        raise UserError(f"{words[1]}: a FILE has no options here; write the command that starts it after --")
    path = _find(words[0] if words else None)
    exercise = find_exercise(path)
    single = exercise is not None and exercise.launch == "single"
    on_cpu = hides_gpus(1 if single else nproc, device)
    if name := next((name for name in ("ignore", "baseline", "write_baseline") if chosen[name]), ""):
        raise UserError(f"--{name.replace('_', '-')} is for a COMMAND; an exercise is done when it has no finding")
    console, json, verbose = Console(highlight=False), chosen["json"], chosen["verbose"]
    if watch:
        _watch(path, nproc, on_cpu, console, verbose)
    verdict = show_all(check_file(path, nproc=nproc, on_cpu=on_cpu), json, verbose)
    write_reports(verdict, Path.cwd(), chosen["junit"], chosen["sarif"])
    _record(verdict)
    in_a_notebook = os.environ.get("WORKSHOP_NOTEBOOK")
    done = verdict.subject.goals and not verdict.errors
    if done and not json and not in_a_notebook and (exercise := next_exercise()):
        console.print(f"next: {workshop_command()} check {short(exercise.path)}")
    return verdict.status


def is_command(words: Sequence[str]) -> bool:
    """Whether these words are a command that starts a program, and not the file or the name of an exercise."""
    if not words:
        return False
    return len(words) > 1 or "=" in words[0] or words[0] in READERS


def _find(file: str | None) -> Path:
    """Return the program or job script to check, also if ``file`` names a different file of the same exercise."""
    if file is None:
        require_stages()
        exercise = next_exercise()
        if exercise is None:
            raise UserError("all exercises are done; name a FILE to check it again")
        return exercise.path
    path = Path(file).expanduser()
    if not path.exists() and (ROOT / path).exists():
        path = ROOT / path  # a path as in the README, but from a different current folder
    if not (path.exists() or path.suffix or os.sep in file):
        return resolve_exercise(file).path
    exercise = find_exercise(path)
    return path.with_name(exercise.file) if exercise else path


def _is_own(verdict: Verdict) -> bool:
    """Whether the file that was checked is the learner's own, and not a solution or a copy."""
    return bool(verdict.subject.name) and verdict.subject.file == (ROOT / verdict.subject.name).resolve()


def _record(verdict: Verdict) -> None:
    """Record which goals are met, if the file that was checked is the learner's own."""
    if _is_own(verdict):
        states = verdict.states()
        record_check(verdict.subject.name, {goal: state in ("met", "unjudged") for goal, state in states.items()})
        _share(verdict)


def _share(verdict: Verdict) -> None:
    """Share a check with the board of the class: the goals that it has judged, and the rule of the first finding."""
    if _is_own(verdict):
        judged = {"met": True, "unjudged": True, "open": False}  # the other states say nothing about a goal
        goals = {goal: judged[state] for goal, state in verdict.states().items() if state in judged}
        rule = verdict.errors[0].kind if verdict.errors else ""
        event = {"event": "check", "exercise": verdict.subject.name, "goals": goals, "rule": rule}
        share(sharing_path(), **event, seconds=round(verdict.seconds, 1))


def _watch(path: Path, nproc: int, on_cpu: bool, console: Console, verbose: bool) -> NoReturn:
    """Check the quick goals at every save, until interrupted."""
    seen = None
    while True:
        stamp = _stamp(path)
        if stamp != seen:
            seen = stamp
            console.clear()
            try:
                for verdict in check_file(path, nproc=nproc, on_cpu=on_cpu, quick=True):
                    show(verdict, console, verbose)
                    if "waiting" in verdict.states().values():
                        console.print("[dim]to check the remaining goals, run the check once without --watch[/]")
                _share(verdict)
            except UserError as error:
                console.print(f"[red]{error}[/]", markup=True)
            console.print("[dim]waiting for the next save; press Ctrl-C to stop[/]")
        time.sleep(0.2)


def _stamp(path: Path) -> list[tuple[int, int] | None]:
    """Return a value that changes when a file of the exercise is saved."""
    exercise = find_exercise(path)
    files = [path, *(path.with_name(own.name) for own, _ in exercise.pairs[1:])] if exercise else [path]
    return [(file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else None for file in files]
