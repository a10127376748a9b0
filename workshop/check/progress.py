"""What a learner has reached: goals met and hints seen, in a file that survives."""

import json
import os
import sys
import tomllib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from workshop.check.exercises import EXERCISES, Exercise
from workshop.repository import ROOT

HINTS_PER_GOAL = 3


def progress_path() -> Path:
    """The file with the progress: ``$WORKSHOP_PROGRESS``, or ``.progress.json`` in the repository."""
    return Path(os.environ.get("WORKSHOP_PROGRESS") or ROOT / ".progress.json").expanduser()


def read_progress() -> dict:
    """What has been recorded, by the exercise's name.

    Each entry has ``goals`` (number: whether the last check found it met), ``hints`` (number of the goal: how many of
    its hints have been shown), ``first_checked`` and ``last_checked`` (ISO times, or None). A file that makes no sense
    is put aside as ``.progress.json.damaged``, and the progress begins anew: it must never keep anybody from learning.
    """
    path = progress_path()
    try:
        content = path.read_bytes()
    except OSError:  # there is none yet, or it cannot be read
        return {}
    try:
        return _parse(content)
    except Exception:  # whatever is wrong with it
        _put_aside(path)
        return {}


def _parse(content: bytes) -> dict:
    """The progress in a file. Raises any exception at all if it is not as ``_write`` makes it."""
    progress = {}
    for name, entry in json.loads(content).items():
        for time in (entry["first_checked"], entry["last_checked"]):
            if time is not None:
                datetime.fromisoformat(time)
        progress[name] = {
            "goals": {int(goal): bool(met) for goal, met in entry["goals"].items()},
            "hints": {int(goal): min(max(int(shown), 0), HINTS_PER_GOAL) for goal, shown in entry["hints"].items()},
            "first_checked": entry["first_checked"],
            "last_checked": entry["last_checked"],
        }
    return progress


def _put_aside(path: Path) -> None:
    damaged = path.with_name(path.name + ".damaged")
    try:
        os.replace(path, damaged)
    except OSError:
        return
    print(f"workshop: {path} was damaged and is now {damaged.name}; the progress begins anew", file=sys.stderr)


def _change(name: str, change: Callable[[dict], None]) -> None:
    """Let ``change`` alter the entry of an exercise, and write the progress with it."""
    progress = read_progress()
    change(progress.setdefault(name, {"goals": {}, "hints": {}, "first_checked": None, "last_checked": None}))
    _write(progress)


def _write(progress: dict) -> None:
    """Write the progress; where that is impossible (a read-only folder), go on without."""
    path = progress_path()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.read_bytes()  # one that cannot be read is somebody else's: it is left as it is
        temporary.write_text(json.dumps(progress, indent=1) + "\n")
        # os.replace is atomic: whoever reads finds the old progress or the new one, never half of one.
        os.replace(temporary, path)
    except OSError:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            pass


def record_check(name: str, goals: dict[int, bool]) -> None:
    """Record what a check has found: for each goal of the exercise whether it is met."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")

    def change(entry):
        entry["goals"] = dict(goals)
        entry["first_checked"] = entry["first_checked"] or now
        entry["last_checked"] = now

    _change(name, change)


def open_goals(exercise: Exercise) -> list[int]:
    """The goals that the last check has not found met, in the exercise's order; all of them before the first check."""
    met = read_progress().get(exercise.name, {}).get("goals", {})
    return [goal for goal in exercise.goals if not met.get(goal)]


def is_done(name: str) -> bool:
    """Whether the last check has found all goals of an exercise met."""
    return any(exercise.name == name and not open_goals(exercise) for exercise in EXERCISES)


def next_exercise() -> Exercise | None:
    """The first exercise that is not done; None if all are."""
    return next((exercise for exercise in EXERCISES if not is_done(exercise.name)), None)


def read_hints() -> dict[str, dict[int, list[str]]]:
    """The hints in ``hints.toml``: three for each goal with a TODO, by the exercise's name; each is one line."""
    tables = tomllib.loads(Path(__file__).with_name("hints.toml").read_text(encoding="utf-8"))
    return {
        name: {int(goal): [" ".join(text.split()) for text in texts] for goal, texts in table.items()}
        for name, table in tables.items()
    }


def hints_shown(name: str, goal: int) -> int:
    """How many hints for a goal have been shown."""
    return read_progress().get(name, {}).get("hints", {}).get(goal, 0)


def next_hint(name: str, goal: int) -> tuple[int, str]:
    """The number and the text of the next hint for a goal, which then counts as shown; after the third the third."""
    number = min(hints_shown(name, goal) + 1, HINTS_PER_GOAL)
    text = read_hints()[name][goal][number - 1]
    _change(name, lambda entry: entry["hints"].update({goal: number}))
    return number, text


def _when(last: datetime) -> str:
    """The time of today, the day of another one: short."""
    return f"{last:%H:%M}" if last.date() == datetime.now().astimezone().date() else f"{last:%d %b}"


def show_progress(console) -> None:
    """Print a table to a rich console: each exercise, its goals met, the hints used, and when it was last checked."""
    from rich.table import Table

    progress = read_progress()
    # No lines, short columns: the names are long, and a terminal may have no more than 80 columns.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("exercise", overflow="fold")
    for heading in ("goals\nmet", "hints\nused", "last\nchecked"):
        table.add_column(heading, justify="right", no_wrap=True)
    for exercise in EXERCISES:
        entry = progress.get(exercise.name, {})
        met = sum(entry.get("goals", {}).get(goal, False) for goal in exercise.goals)
        last = entry.get("last_checked")
        table.add_row(
            exercise.name,
            f"{met}/{len(exercise.goals)}",
            str(sum(entry.get("hints", {}).values())),
            _when(datetime.fromisoformat(last).astimezone()) if last else "not yet",
            style="green" if met == len(exercise.goals) else None,
        )
    console.print(table)
