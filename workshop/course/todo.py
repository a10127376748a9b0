"""Compare exercises with their solutions hunk by hunk, and write versions in which only some TODOs are done.

python -m workshop.course.todo EXERCISE 1,2 FILE writes the exercise with TODOs 1 and 2 done as in the solution.
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
    """Some lines of an exercise, and the corresponding lines of the solution.

    Attributes:
        numbers: the numbers of the TODOs in the lines of the exercise; empty if both are equal.
        before: the lines of the exercise.
        after: the lines of the solution.
    """

    numbers: set[int]
    before: list[str]
    after: list[str]


def _head_lines(path: Path) -> int:
    """Count the lines of the head of a file: the docstring of a program, or the first comments of a job script."""
    text = path.read_text()
    if path.suffix == ".py":
        return ast.parse(text).body[0].end_lineno or 0
    return text[: text.find("#SBATCH")].count("\n") if "#SBATCH" in text else 0


def _body(path: Path) -> list[str]:
    """Return the lines after the head. In a runner, the path to the package is always the one of the exercise."""
    lines = path.read_text().replace("/../../workshop/", "/../workshop/").splitlines(keepends=True)
    return lines[_head_lines(path) :]


def _head(path: Path) -> str:
    return "".join(path.read_text().splitlines(keepends=True)[: _head_lines(path)])


def numbers_in(text: str) -> set[int]:
    """Return the numbers of the TODO comments in lines of a program."""
    return {int(number) for number in re.findall(r"# +TODO (\d)", text)}


def hunks(own: Path, solution: Path) -> list[Hunk]:
    """Compare a file of an exercise with the solution: return the differences and the equal lines, in order."""
    before, after = _body(own), _body(solution)
    exercise = find_exercise(own)
    whole = exercise.todo_of.get(own.name) if exercise else None
    found = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        numbers = numbers_in("".join(before[a:b])) if whole is None else {whole}
        found.append(Hunk(numbers if kind != "equal" else set(), before[a:b], after[c:d]))
    return found


def version(own: Path, solution: Path, done: Collection[int]) -> str:
    """Return the text of a file of an exercise in which the TODOs with these numbers are done as in the solution."""
    lines = []
    for hunk in hunks(own, solution):
        lines += hunk.after if hunk.numbers and hunk.numbers <= set(done) else hunk.before
    return _head(own) + "".join(lines)


def write_version(exercise: Exercise, done: Collection[int], folder: Path) -> Path:
    """Write all files of an exercise into a folder with these TODOs done; return the path of the program or job script.

    Of other exercises that the program imports, write the solutions.
    """
    for own, solution in exercise.pairs:
        (folder / own.name).write_text(version(own, solution, done))
        (folder / own.name).chmod(0o755)
    for name in exercise.imports:
        (folder / name).write_text(exercise.solution.with_name(name).read_text())
    return folder / exercise.file


def main() -> None:
    """Write the version that the command line describes."""
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
