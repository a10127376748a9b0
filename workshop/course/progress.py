"""Record the progress of a learner in a file: the goals that are met, and the hints that were shown."""

import copy
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from workshop.course.exercises import HINTS_PER_GOAL, Exercise, exercises
from workshop.course.sharing import class_folder, membership, share
from workshop.repository import ROOT, workshop_command

if TYPE_CHECKING:
    from rich.console import Console


class Entry(TypedDict):
    """The progress in one exercise.

    Attributes:
        goals: for each goal, by number: whether it was met in the last check.
        hints: for each goal, by number: how many of its hints have been shown.
        first_checked, last_checked: ISO times; None: never.
    """

    goals: dict[int, bool]
    hints: dict[int, int]
    first_checked: str | None
    last_checked: str | None


NEVER: Entry = {"goals": {}, "hints": {}, "first_checked": None, "last_checked": None}


def progress_path() -> Path:
    """Return the path of the progress file: ``$WORKSHOP_PROGRESS``, or ``.progress.json`` in the repository."""
    return Path(os.environ.get("WORKSHOP_PROGRESS") or ROOT / ".progress.json").expanduser()


def sharing_path() -> Path:
    """Return the path of the file, beside the progress, that says whether the learner shares with the board of a class."""
    return progress_path().with_name(progress_path().name + ".board")


def read_progress() -> dict[str, Entry]:
    """Read the recorded progress, by the name of the exercise.

    A damaged file is renamed to ``.progress.json.damaged``, and the progress starts from zero, so that a damaged file never
    blocks a learner.
    """
    path = progress_path()
    try:
        content = path.read_bytes()
    except OSError:  # the file does not exist yet, or cannot be read
        return {}
    try:
        return _parse(content)
    except Exception:  # _parse may raise anything
        _put_aside(path)
        return {}


def _parse(content: bytes) -> dict[str, Entry]:
    """Parse the content of a progress file. Raises any exception if ``_write`` would not have written it."""
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
    print(f"workshop: {path} was damaged and is now {damaged.name}; your progress starts from zero", file=sys.stderr)


def _change(name: str, change: Callable[[Entry], None]) -> None:
    """Apply ``change`` to the entry of an exercise, and write the progress."""
    progress = read_progress()
    change(progress.setdefault(name, copy.deepcopy(NEVER)))
    _write(progress)


def _write(progress: dict[str, Entry]) -> None:
    """Write the progress. If that is impossible, for example in a read-only folder, continue without it."""
    path = progress_path()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.read_bytes()  # raises if it cannot be read: do not overwrite the file of a different user
        temporary.write_text(json.dumps(progress, indent=1) + "\n")
        # os.replace is atomic, so a reader finds either the old progress or the new one.
        os.replace(temporary, path)
    except OSError:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            pass


def record_check(name: str, goals: dict[int, bool]) -> None:
    """Record the result of a check: whether each goal of the exercise is met."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")

    def change(entry: Entry) -> None:
        entry["goals"] = dict(goals)
        entry["first_checked"] = entry["first_checked"] or now
        entry["last_checked"] = now

    _change(name, change)


def open_goals(exercise: Exercise) -> list[int]:
    """Return the goals that were not met in the last check, in the order of the exercise; before the first check, all goals."""
    entry = read_progress().get(exercise.name, NEVER)
    return [goal.number for goal in exercise.goals if not entry["goals"].get(goal.number)]


def is_done(name: str) -> bool:
    """Return whether all goals of an exercise were met in its last check."""
    return any(exercise.name == name and not open_goals(exercise) for exercise in exercises())


def next_exercise() -> Exercise | None:
    """Return the first exercise that is not done; None if all are done."""
    return next((exercise for exercise in exercises() if not is_done(exercise.name)), None)


def hints_shown(name: str, goal: int) -> int:
    """Return how many hints for a goal have been shown."""
    return read_progress().get(name, NEVER)["hints"].get(goal, 0)


def next_hint(exercise: Exercise, goal: int) -> tuple[int, str]:
    """Return the number and the text of the next hint for a goal, and record it as shown. After the last hint, repeat it."""
    number = min(hints_shown(exercise.name, goal) + 1, HINTS_PER_GOAL)
    _change(exercise.name, lambda entry: entry["hints"].update({goal: number}))
    share(sharing_path(), event="hint", exercise=exercise.name, goal=goal, number=number)
    return number, exercise.goal(goal).hints[number - 1]


def _when(last: datetime) -> str:
    """Return a short time: the time of day if it was today, otherwise the date."""
    return f"{last:%H:%M}" if last.date() == datetime.now().astimezone().date() else f"{last:%d %b}"


def show_progress(console: "Console") -> None:
    """Print a table to a rich console: each exercise, its goals met, the hints used, and when it was last checked.

    Below it is whether the learner shares with the board of the class, if there is one.
    """
    from rich.table import Table

    progress = read_progress()
    # No lines and narrow columns, because the names are long and a terminal may have only 80 columns.
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
    if note := _sharing():
        console.print(note, markup=False, soft_wrap=True)


def _sharing() -> str:
    """Return whether the learner shares with the board of a class; "": no class has a board here."""
    command = f"{workshop_command()} board"
    if member := membership(sharing_path()):
        return f"The board of the class in {member.folder} shows this as {member.name!r}. To stop: {command} leave"
    if class_folder():
        return f"Your class has a board, and you share nothing with it. To share: {command} join NICKNAME"
    return ""
