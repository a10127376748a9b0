"""``workshop hint``, ``workshop diff``, ``workshop reset``: help with an exercise, its solution, back to the start."""

import difflib
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


def resolve_exercise(text: str | os.PathLike[str]) -> Exercise:
    """The exercise that a text means.

    Args:
        text: the path of the exercise, of another file of it or of its solution, seen from the current folder or from the
            repository; or a part of the name that no other exercise has.

    Raises:
        UserError: it is none, or could be several.
    """
    root = require_stages()
    text = os.fspath(text)
    paths = (os.path.realpath(text), os.path.realpath(root / text))
    for exercise in exercises():
        own = {os.path.realpath(path) for path in (exercise.solution, *(file for file, _ in exercise.pairs))}
        if own.intersection(paths):
            return exercise
    every = ", ".join(exercise.name for exercise in exercises())
    if any(os.path.isfile(path) for path in paths):  # single_gpu.py is a part of a name, and another program
        raise UserError(f"{text} is not an exercise; the exercises are: {every}")
    found = [exercise for exercise in exercises() if text in (exercise.path.name, exercise.path.stem)]
    found = found or [exercise for exercise in exercises() if text in exercise.name]
    if not found:
        raise UserError(f"there is no exercise {text!r}; the exercises are: {every}")
    if len(found) > 1:
        raise UserError(f"{text!r} could be {' or '.join(exercise.name for exercise in found)}; say which")
    return found[0]


def run_hint(file: str | os.PathLike[str], goal: int | None = None) -> int:
    """Print the next hint for a goal of an exercise, by default the first goal that is not met, and return 0.

    Raises:
        UserError: there is no such exercise, or no hint for that goal.
    """
    from rich.markdown import Markdown
    from rich.text import Text

    exercise = resolve_exercise(file)
    goals = exercise.todos
    if goal is None:
        goal = next((number for number in open_goals(exercise) if number != KEPT), goals[0])
    if goal not in goals:
        raise UserError(f"{exercise.name} has hints for {_goals(exercise, goals)}; not for goal {goal}")
    number, text = next_hint(exercise, goal)
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
        command, what = f"check {exercise.name}", "No hints left. Try it, and then:"
    # Not wrapped, so that the command can be copied.
    console.print(Text.assemble(f"{what} ", (f"{workshop_command()} {command}", "bold")), soft_wrap=True)
    if hints_shown(exercise.name, goal) < number:
        note = f"This is not remembered: {progress_path()} cannot be written. Set WORKSHOP_PROGRESS to a file that can."
        console.print(Text(note, "yellow"), soft_wrap=True)
    return 0


def run_diff(file: str | os.PathLike[str], force: bool = False) -> int:
    """Print what changes from the learner's files, all of the exercise, to the solution, and return 0.

    Args:
        file: the exercise.
        force: also while goals are open.

    Raises:
        UserError: there is no such exercise or no solution to it, or goals are open and ``force`` is not set.
    """
    from rich.text import Text

    exercise = resolve_exercise(file)
    still_open = [] if force else open_goals(exercise)
    if still_open:
        raise UserError(
            f"{exercise.name} has open goals: {_goals(exercise, still_open)}; "
            "have it checked, or add --solution to see the solution anyway"
        )
    if not exercise.path.is_file():
        raise UserError(f"{exercise.name} is not there; put it back with: {workshop_command()} reset {exercise.name}")
    lines: list[str] = []
    for mine, solution in exercise.pairs:
        if mine == exercise.runner and not (mine.exists() and solution.exists()):
            continue
        root = require_stages()
        before, after = str(mine.relative_to(root)), str(solution.relative_to(root))
        lines += difflib.unified_diff(_lines(mine), _lines(solution), before, after, lineterm="")
    console = _console()
    if not lines:
        console.print(Text(f"{exercise.name} is the solution, line for line"), soft_wrap=True)
    styles = {"---": "bold", "+++": "bold", "@@ ": "cyan", "+": "green", "-": "red"}
    for line in lines:
        style = next((style for start, style in styles.items() if line.startswith(start)), "")
        console.print(Text(line, style), soft_wrap=True)
    return 0


def run_reset(file: str | os.PathLike[str]) -> int:
    """Put all files of an exercise back to what was delivered, keep the learner's files beside them, and return 0.

    What is delivered comes from git: the last commit that this branch shares with its upstream, which holds none of the
    learner's own commits that were not pushed; the last commit where there is no upstream.

    Raises:
        UserError: there is no such exercise, git cannot tell what it was, or the folder cannot be written.
    """
    from rich.text import Text

    exercise = resolve_exercise(file)
    revision, delivered = _delivered(exercise)
    console = _console()
    number = 1
    while any(_kept(path, number).exists() for path in delivered):
        number += 1
    try:
        changed = [path for path, content in delivered.items() if not path.exists() or path.read_bytes() != content]
        if not changed:
            text = f"{exercise.name} is as it was in {revision}: nothing to put back"
            console.print(Text(text), soft_wrap=True)
        for path in changed:  # keep all of it before anything is replaced
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
            console.print(Text(f"{name} is as it was in {revision} again{kept}"), soft_wrap=True)
    except OSError as error:
        raise UserError(f"cannot put {exercise.name} back: {error}") from error
    return 0


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)


def _goals(exercise: Exercise, numbers: Iterable[int]) -> str:
    """The goals with these numbers, for a sentence."""
    return ", ".join(f"{number} ({exercise.goal(number).title})" for number in numbers)


def _lines(path: Path) -> list[str]:
    """The lines of a file; a runner's way to the package counts as the same from either folder."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from error
    if path.suffix == ".sh":
        text = text.replace("$here/../../workshop/", "$here/../workshop/")
    return text.splitlines()


def _kept(path: Path, number: int) -> Path:
    """Where a learner's file is kept: ``exercise1_topic.mine-1.py``."""
    return path.with_name(f"{path.stem}.mine-{number}{path.suffix}")


def _delivered(exercise: Exercise) -> tuple[str, dict[Path, bytes]]:
    """Where it is known what was delivered (a commit, shortened, or a folder), and the files of the exercise from there."""
    root = require_stages()
    if (root / ORIGIN).exists():
        origin = Path((root / ORIGIN).read_text().splitlines()[1])
        there = {path: origin / path.relative_to(root) for path, _ in exercise.pairs}
        try:
            return str(origin), {path: source.read_bytes() for path, source in there.items()}
        except OSError as error:
            raise UserError(f"cannot read what {exercise.name} was in {origin} ({error.strerror})") from error

    def content(revision: str, path: Path) -> bytes:
        # "./" is seen from the folder: the repository may lie inside of another one.
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
            f"git cannot tell what {exercise.name} was ({error}); take the file from a fresh clone of the course"
        ) from error
    delivered = {exercise.path: main}
    try:
        for path, _ in exercise.pairs[1:]:
            delivered[path] = content(revision, path)
    except _GitError:
        pass  # it has none
    return "commit " + _git(root, "rev-parse", "--short", revision).decode().strip(), delivered


class _GitError(Exception):
    pass


def _git(root: Path, *arguments: str) -> bytes:
    """What git prints. Raises a ``_GitError`` with its message if it fails, or is not there."""
    # Where git itself has started this program, say in a hook, these name another repository.
    env = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], env=env, capture_output=True)
    except OSError as error:
        raise _GitError(f"git does not run: {error.strerror}") from error
    if done.returncode != 0:
        raise _GitError(" ".join(done.stderr.decode(errors="replace").split()))
    return done.stdout
