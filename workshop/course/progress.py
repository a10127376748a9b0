"""What a learner has reached: goals met and hints seen, in a file that survives."""

import copy
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from workshop.course.exercises import HINTS_PER_GOAL, Exercise, exercises
from workshop.repository import ROOT

if TYPE_CHECKING:
    from rich.console import Console


class Entry(TypedDict):
    """What is known of one exercise.

    Attributes:
        goals: by the number of the goal, whether the last check found it met.
        hints: by the number of the goal, how many of its hints have been shown.
        first_checked, last_checked: ISO times; None: never.
    """

    goals: dict[int, bool]
    hints: dict[int, int]
    first_checked: str | None
    last_checked: str | None


NEVER: Entry = {"goals": {}, "hints": {}, "first_checked": None, "last_checked": None}


def progress_path() -> Path:
    """The file with the progress: ``$WORKSHOP_PROGRESS``, or ``.progress.json`` in the repository."""
    return Path(os.environ.get("WORKSHOP_PROGRESS") or ROOT / ".progress.json").expanduser()


def read_progress() -> dict[str, Entry]:
    """What has been recorded, by the exercise's name.

    A file that makes no sense is put aside as ``.progress.json.damaged``, and the progress begins anew: it must never keep
    anybody from learning.
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


def _parse(content: bytes) -> dict[str, Entry]:
    """The progress in a file. Raises any exception at all if it is not as ``_write`` makes it."""
    progress: dict[str, Entry] = {}
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


def _change(name: str, change: Callable[[Entry], None]) -> None:
    """Let ``change`` alter the entry of an exercise, and write the progress with it."""
    progress = read_progress()
    change(progress.setdefault(name, copy.deepcopy(NEVER)))
    _write(progress)


def _write(progress: dict[str, Entry]) -> None:
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

    def change(entry: Entry) -> None:
        entry["goals"] = dict(goals)
        entry["first_checked"] = entry["first_checked"] or now
        entry["last_checked"] = now

    _change(name, change)


def open_goals(exercise: Exercise) -> list[int]:
    """The goals that the last check has not found met, in the exercise's order; all of them before the first check."""
    entry = read_progress().get(exercise.name, NEVER)
    return [goal.number for goal in exercise.goals if not entry["goals"].get(goal.number)]


def is_done(name: str) -> bool:
    """Whether the last check has found all goals of an exercise met."""
    return any(exercise.name == name and not open_goals(exercise) for exercise in exercises())


def next_exercise() -> Exercise | None:
    """The first exercise that is not done; None if all are."""
    return next((exercise for exercise in exercises() if not is_done(exercise.name)), None)


def hints_shown(name: str, goal: int) -> int:
    """How many hints for a goal have been shown."""
    return read_progress().get(name, NEVER)["hints"].get(goal, 0)


def next_hint(exercise: Exercise, goal: int) -> tuple[int, str]:
    """The number and the text of the next hint for a goal, which then counts as shown; after the third the third."""
    number = min(hints_shown(exercise.name, goal) + 1, HINTS_PER_GOAL)
    _change(exercise.name, lambda entry: entry["hints"].update({goal: number}))
    return number, exercise.goal(goal).hints[number - 1]


def _when(last: datetime) -> str:
    """The time of today, the day of another one: short."""
    return f"{last:%H:%M}" if last.date() == datetime.now().astimezone().date() else f"{last:%d %b}"


def show_progress(console: "Console") -> None:
    """Print a table to a rich console: each exercise, its goals met, the hints used, and when it was last checked."""
    from rich.table import Table

    progress = read_progress()
    # No lines, short columns: the names are long, and a terminal may have no more than 80 columns.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("exercise", overflow="fold")
    for heading in ("goals\nmet", "hints\nused", "last\nchecked"):
        table.add_column(heading, justify="right", no_wrap=True)
    for exercise in exercises():
        entry = progress.get(exercise.name, NEVER)
        met = sum(entry["goals"].get(goal.number, False) for goal in exercise.goals)
        last = entry["last_checked"]
        table.add_row(
            exercise.name,
            f"{met}/{len(exercise.goals)}",
            str(sum(entry["hints"].values())),
            _when(datetime.fromisoformat(last).astimezone()) if last else "not yet",
            style="green" if met == len(exercise.goals) else None,
        )
    console.print(table)
