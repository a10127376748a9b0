"""Exercises and their solutions, hunk by hunk: which TODO each difference belongs to, and versions with some TODOs done.

python -m workshop.check.todo EXERCISE 1,2 FILE writes the exercise with its TODOs 1 and 2 done as in the solution.
"""

import ast
import difflib
import re
import sys
from pathlib import Path

from workshop.check.exercises import EXERCISES, Exercise

CONFIGURATION = 2  # the TODO that ds_config.json of stage 05 belongs to


def _head_lines(path: Path) -> int:
    """How many lines of a file only say what it is: a program's docstring, a job script's first comments."""
    text = path.read_text()
    if path.suffix == ".py":
        return ast.parse(text).body[0].end_lineno
    if path.suffix == ".json":
        return 0
    return text[: text.find("#SBATCH")].count("\n") if "#SBATCH" in text else 0


def _body(path: Path) -> list[str]:
    """The lines after the head; of a runner with the path to the workshop as in the exercises."""
    lines = path.read_text().replace("/../../workshop/", "/../workshop/").splitlines(keepends=True)
    return lines[_head_lines(path) :]


def _head(path: Path) -> str:
    return "".join(path.read_text().splitlines(keepends=True)[: _head_lines(path)])


def hunks(exercise: Path, solution: Path) -> list[tuple[set[int], list[str], list[str]]]:
    """The differences in order: the numbers of the TODOs on the exercise's side, its lines, the solution's lines. Equal lines
    between them come as hunks with equal sides and no numbers."""
    before, after = _body(exercise), _body(solution)
    found = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        numbers = {int(number) for line in before[a:b] for number in re.findall(r"# +TODO (\d)", line)}
        if exercise.suffix == ".json":  # which can hold no comments
            numbers = {CONFIGURATION}
        found.append((numbers if kind != "equal" else set(), before[a:b], after[c:d]))
    return found


def version(exercise: Path, solution: Path, done: set[int]) -> str:
    """The text of an exercise with the TODOs of these numbers done as in the solution."""
    lines = []
    for numbers, before, after in hunks(exercise, solution):
        lines += after if numbers and numbers <= done else before
    return _head(exercise) + "".join(lines)


def write_version(exercise: Exercise, done: set[int], folder: Path) -> Path:
    """Write that version of all its files into a folder; return the script."""
    script = folder / exercise.path.name
    for own, other in exercise.pairs:
        (folder / own.name).write_text(version(own, other, done))
        (folder / own.name).chmod(0o755)
    return script


def main() -> None:
    try:
        name, numbers, file = sys.argv[1:]
        (exercise,) = (each for each in EXERCISES if each.path.stem == Path(name).stem)
        done = {int(number) for number in numbers.split(",")}
    except ValueError:
        sys.exit("python -m workshop.check.todo EXERCISE 1,2 FILE")
    Path(file).write_text(version(exercise.path, exercise.solution, done))


if __name__ == "__main__":
    main()
