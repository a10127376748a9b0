"""Help with an exercise (``workshop hint``), compare it with its solution (``diff``), or restore it (``reset``)."""

import difflib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from workshop.check.subject import KEPT
from workshop.course.exercises import HINTS_PER_GOAL, Exercise, exercises
from workshop.course.progress import hints_shown, next_hint, open_goals, progress_path
from workshop.errors import UserError
from workshop.repository import ORIGIN, require_stages, workshop_command

if TYPE_CHECKING:
    from rich.console import Console

HINT_VERSION = 1  # of the fields of ``hint --json``; it increases if a field is removed or changes its meaning
HINT_KINDS = ("question", "api", "partial solution")  # of the hints of a goal, in their order


def resolve_exercise(text: str | os.PathLike[str]) -> Exercise:
    """Find the exercise that the user has named.

    Args:
        text: the path of a file of the exercise or of its solution, relative to the current folder or to the repository; or a
            part of the name that no other exercise has.

    Raises:
        UserError: the text names no exercise, or could name several.
    """
    root = require_stages()
    text = os.fspath(text)
    paths = (os.path.realpath(text), os.path.realpath(root / text))
    for exercise in exercises():
        own = {os.path.realpath(path) for path in (exercise.solution, *(file for file, _ in exercise.pairs))}
        if own.intersection(paths):
            return exercise
    every = ", ".join(exercise.name for exercise in exercises())
    if any(os.path.isfile(path) for path in paths):  # such as single_gpu.py, which is also part of an exercise's name
        raise UserError(f"{text} is not an exercise; the exercises are: {every}")
    found = [exercise for exercise in exercises() if text in (exercise.path.name, exercise.path.stem)]
    found = found or [exercise for exercise in exercises() if text in exercise.name]
    if not found:
        raise UserError(f"there is no exercise {text!r}; the exercises are: {every}")
    if len(found) > 1:
        raise UserError(f"{text!r} could be {' or '.join(exercise.name for exercise in found)}; give the full name")
    return found[0]


def run_hint(file: str | os.PathLike[str], goal: int | None = None, *, as_json: bool = False) -> int:
    """Print the next hint for a goal of an exercise, by default the first goal that is not met, and return 0.

    Args:
        file: the exercise.
        goal: the number of the goal.
        as_json: print JSON; docs/for-assistants.md describes its fields.

    Raises:
        UserError: there is no such exercise, or no hint for that goal.
    """
    exercise = resolve_exercise(file)
    goals = exercise.todos
    if goal is None:
        goal = next((number for number in open_goals(exercise) if number != KEPT), goals[0])
    if goal not in goals:
        raise UserError(f"{exercise.name} has hints for {_goals(exercise, goals)}, but not for goal {goal}")
    number, text = next_hint(exercise, goal)
    saved = hints_shown(exercise.name, goal) >= number
    if as_json:
        said: dict[str, object] = {"version": HINT_VERSION, "exercise": exercise.name, "goal": goal}
        said |= {"title": exercise.goal(goal).title, "number": number, "of": HINTS_PER_GOAL}
        print(json.dumps(said | {"kind": HINT_KINDS[number - 1], "text": text, "saved": saved}, indent=2))
    else:
        _show_hint(exercise, goal, number, text, saved)
    return 0


def _show_hint(exercise: Exercise, goal: int, number: int, text: str, saved: bool) -> None:
    """Print a hint for a person."""
    from rich.markdown import Markdown
    from rich.text import Text

    left = HINTS_PER_GOAL - number
    console = _console()
    console.print(Text(f"{exercise.name}, goal {goal}: {exercise.goal(goal).title}", "bold"))
    console.print()
    console.print(Text(f"Hint {number} of {HINTS_PER_GOAL}", "bold cyan"))
    console.print(Markdown(text))
    console.print()
    if left:
        command, what = f"hint {exercise.name} {goal}", f"{left} {'hint' if left == 1 else 'hints'} left. The next one:"
    else:
        command, what = f"check {exercise.name}", "No hints left. Change your program, then run:"
    # Not wrapped, so that the command can be copied.
    console.print(Text.assemble(f"{what} ", (f"{workshop_command()} {command}", "bold")), soft_wrap=True)
    if not saved:
        note = f"{progress_path()} is not writable, so your progress is not saved. Set WORKSHOP_PROGRESS to a writable file."
        console.print(Text(note, "yellow"), soft_wrap=True)


def run_diff(file: str | os.PathLike[str], force: bool = False) -> int:
    """Print the differences between all files of the exercise and the solution, and return 0.

    Args:
        file: the exercise.
        force: print them even if goals are open.

    Raises:
        UserError: there is no such exercise or no solution to it, or goals are open and ``force`` is not set.
    """
    from rich.text import Text

    exercise = resolve_exercise(file)
    still_open = [] if force else open_goals(exercise)
    if still_open:
        raise UserError(
            f"{exercise.name} has open goals: {_goals(exercise, still_open)}; "
            "check it, or add --solution to see the solution anyway"
        )
    if not exercise.path.is_file():
        raise UserError(f"{exercise.name} does not exist; restore it with: {workshop_command()} reset {exercise.name}")
    lines: list[str] = []
    for mine, solution in exercise.pairs:
        if mine == exercise.runner and not (mine.exists() and solution.exists()):
            continue
        root = require_stages()
        before, after = str(mine.relative_to(root)), str(solution.relative_to(root))
        lines += difflib.unified_diff(_lines(mine), _lines(solution), before, after, lineterm="")
    console = _console()
    if not lines:
        console.print(Text(f"{exercise.name} is identical to the solution"), soft_wrap=True)
    styles = {"---": "bold", "+++": "bold", "@@ ": "cyan", "+": "green", "-": "red"}
    for line in lines:
        style = next((style for start, style in styles.items() if line.startswith(start)), "")
        console.print(Text(line, style), soft_wrap=True)
    return 0


def run_reset(file: str | os.PathLike[str]) -> int:
    """Restore all files of an exercise, keep the learner's files beside them, and return 0.

    The original files come from git: from the last commit that this branch shares with its upstream, because later commits
    may be the learner's own; without an upstream, from the last commit.

    Raises:
        UserError: there is no such exercise, git does not have its original, or the folder is not writable.
    """
    from rich.text import Text

    exercise = resolve_exercise(file)
    revision, delivered = delivered_files(exercise)
    console = _console()
    number = 1
    while any(_kept(path, number).exists() for path in delivered):
        number += 1
    try:
        changed = [path for path, content in delivered.items() if not path.exists() or path.read_bytes() != content]
        if not changed:
            text = f"{exercise.name} is already as in {revision}: nothing to restore"
            console.print(Text(text), soft_wrap=True)
        for path in changed:  # keep all files before the first one is replaced
            if path.exists():
                shutil.copy2(path, _kept(path, number))
        for path in changed:
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_bytes(delivered[path])
            if path.suffix == ".sh":
                temporary.chmod(temporary.stat().st_mode | 0o111)
            kept = f"; yours is kept as {_kept(path, number).name}" if path.exists() else ""
            os.replace(temporary, path)
            name = path.relative_to(require_stages())
            console.print(Text(f"{name} is restored from {revision}{kept}"), soft_wrap=True)
    except OSError as error:
        raise UserError(f"cannot restore {exercise.name}: {error}") from error
    return 0


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)


def _goals(exercise: Exercise, numbers: Iterable[int]) -> str:
    """Return the goals with these numbers as a list for a sentence."""
    return ", ".join(f"{number} ({exercise.goal(number).title})" for number in numbers)


def _lines(path: Path) -> list[str]:
    """Return the lines of a file. In a runner, the path to the package is the same for the exercise and the solution."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from error
    if path.suffix == ".sh":
        text = text.replace("$here/../../workshop/", "$here/../workshop/")
    return text.splitlines()


def _kept(path: Path, number: int) -> Path:
    """Return the path under which a learner's file is kept, such as ``exercise1_topic.mine-1.py``."""
    return path.with_name(f"{path.stem}.mine-{number}{path.suffix}")


def delivered_files(exercise: Exercise) -> tuple[str, dict[Path, bytes]]:
    """Return the source of the original files (a short commit hash, or a folder), and their contents.

    Raises:
        UserError: neither git nor a shared course has them.
    """
    root = require_stages()
    if (root / ORIGIN).exists():
        origin = Path((root / ORIGIN).read_text().splitlines()[1])
        there = {path: origin / path.relative_to(root) for path, _ in exercise.pairs}
        try:
            return str(origin), {path: source.read_bytes() for path, source in there.items()}
        except OSError as error:
            raise UserError(f"cannot read the original {exercise.name} in {origin} ({error.strerror})") from error

    def content(revision: str, path: Path) -> bytes:
        # "./" makes the path relative to this folder, because the course may be inside a larger git repository.
        return _git(root, "cat-file", "blob", f"{revision}:./{path.relative_to(root).as_posix()}")

    try:
        try:
            revision = _git(root, "merge-base", "HEAD", "@{upstream}").decode().strip()
            main = content(revision, exercise.path)
        except _GitError:
            revision = "HEAD"
            main = content(revision, exercise.path)
    except _GitError as error:
        raise UserError(
            f"git does not have the original {exercise.name} ({error}); copy the file from a fresh clone of the course"
        ) from error
    delivered = {exercise.path: main}
    try:
        for path, _ in exercise.pairs[1:]:
            delivered[path] = content(revision, path)
    except _GitError:
        pass  # the exercise has only one file
    return "commit " + _git(root, "rev-parse", "--short", revision).decode().strip(), delivered


class _GitError(Exception):
    pass


def _git(root: Path, *arguments: str) -> bytes:
    """Return what git prints. Raises a ``_GitError`` with git's message if git fails or is not installed."""
    # If git itself has started this program, for example in a hook, these variables name a different repository.
    env = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], env=env, capture_output=True)
    except OSError as error:
        raise _GitError(f"git cannot be started: {error.strerror}") from error
    if done.returncode != 0:
        raise _GitError(" ".join(done.stderr.decode(errors="replace").split()))
    return done.stdout
