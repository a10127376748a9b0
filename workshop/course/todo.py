"""Exercises and their solutions, hunk by hunk: which TODO each difference belongs to, and versions with some TODOs done.

python -m workshop.course.todo EXERCISE 1,2 FILE writes the exercise with its TODOs 1 and 2 done as in the solution.
"""

import ast
import difflib
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from workshop.course.exercises import Exercise, find_exercise
from workshop.course.learning import resolve_exercise
from workshop.errors import UserError


class Hunk(NamedTuple):
    """Some lines of an exercise, and what the solution has in their place.

    Attributes:
        numbers: of the TODOs in the exercise's lines; none where both are equal.
        before: the exercise's lines.
        after: the solution's.
    """

    numbers: set[int]
    before: list[str]
    after: list[str]


def _head_lines(path: Path) -> int:
    """How many lines of a file only say what it is: a program's docstring, a job script's first comments."""
    text = path.read_text()
    if path.suffix == ".py":
        return ast.parse(text).body[0].end_lineno or 0
    return text[: text.find("#SBATCH")].count("\n") if "#SBATCH" in text else 0


def _body(path: Path) -> list[str]:
    """The lines after the head; of a runner with the path to the workshop as in the exercises."""
    lines = path.read_text().replace("/../../workshop/", "/../workshop/").splitlines(keepends=True)
    return lines[_head_lines(path) :]


def _head(path: Path) -> str:
    return "".join(path.read_text().splitlines(keepends=True)[: _head_lines(path)])


def numbers_in(text: str) -> set[int]:
    """The numbers of the TODO comments in lines of a program."""
    return {int(number) for number in re.findall(r"# +TODO (\d)", text)}


def hunks(own: Path, solution: Path) -> list[Hunk]:
    """A file of an exercise beside the solution's, in order: differences, and the equal lines between them."""
    before, after = _body(own), _body(solution)
    exercise = find_exercise(own)
    whole = exercise.todo_of.get(own.name) if exercise else None
    found = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        numbers = numbers_in("".join(before[a:b])) if whole is None else {whole}
        found.append(Hunk(numbers if kind != "equal" else set(), before[a:b], after[c:d]))
    return found


def version(own: Path, solution: Path, done: Collection[int]) -> str:
    """The text of a file of an exercise with the TODOs of these numbers done as in the solution."""
    lines = []
    for hunk in hunks(own, solution):
        lines += hunk.after if hunk.numbers and hunk.numbers <= set(done) else hunk.before
    return _head(own) + "".join(lines)


def write_version(exercise: Exercise, done: Collection[int], folder: Path) -> Path:
    """Write that version of all its files into a folder; return the script."""
    for own, solution in exercise.pairs:
        (folder / own.name).write_text(version(own, solution, done))
        (folder / own.name).chmod(0o755)
    return folder / exercise.file


def main() -> None:
    """Write a version with some TODOs done, as the command line asks."""
    try:
        name, numbers, file = sys.argv[1:]
        done = {int(number) for number in numbers.split(",")}
        exercise = resolve_exercise(name)
    except ValueError:
        sys.exit("python -m workshop.course.todo EXERCISE 1,2 FILE")
    except UserError as error:
        sys.exit(f"python -m workshop.course.todo: {error}")
    Path(file).write_text(version(exercise.path, exercise.solution, done))


if __name__ == "__main__":
    main()
