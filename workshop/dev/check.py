"""Run ``workshop dev check``: report what is missing after a change to the course."""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from workshop.check.rules.rule import RULES
from workshop.course import todo
from workshop.course.checking import check_file
from workshop.course.exercises import Exercise, exercises, find_exercise
from workshop.dev.documents import wrong_links
from workshop.dev.wording import unexplained_terms, unmeasured_figures
from workshop.repository import require_stages

SHORTEST = 12  # characters; a hint may contain shorter lines of the solution


def run_dev_check(files: tuple[str, ...], everything: bool) -> int:
    """Print each problem in one line, and return 1 if there is one, else 0.

    Args:
        files: files of the exercises to run, unsolved and solved; empty: the files that differ from the last commit.
        everything: run all exercises.

    Raises:
        UserError: an exercises.toml is wrong, or a file belongs to no exercise.
    """
    problems = [problem for look in LOOKS for problem in look()]
    for exercise in _chosen(files, everything):
        problems += judged(exercise)
    for problem in problems:
        print(problem)
    print(
        f"dev check: {len(problems)} problem{'s' * (len(problems) != 1)}"
        if problems
        else "dev check: nothing is missing"
    )
    return 1 if problems else 0


def _chosen(files: tuple[str, ...], everything: bool) -> list[Exercise]:
    if everything:
        return list(exercises())
    root = require_stages()
    paths = [Path(file).resolve() for file in files] or [root / name for name in _changed(root)]
    chosen = dict.fromkeys(filter(None, map(find_exercise, paths)))
    return [exercise for exercise in chosen if exercise in exercises()]


def _changed(root: Path) -> list[str]:
    """Return the files that differ from the last commit, and the untracked files."""
    names: list[str] = []
    for command in (["diff", "--name-only", "--relative", "HEAD"], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True)
        names += done.stdout.splitlines()
    return names


# ---------------------------------------------------------------- without running anything


def without_todo() -> Iterator[str]:
    """Find exercises whose goals and TODO comments do not match, and solutions with a TODO."""
    for exercise in exercises():
        missing = [path for pair in exercise.pairs for path in pair if not path.is_file()]
        yield from (f"{_short(path)}: missing" for path in missing)
        if missing:
            continue
        found = set(exercise.todo_of.values())
        for own, solution in exercise.pairs:
            found |= {int(number) for number in re.findall(r"\bTODO (\d)", own.read_text())}
            if "TODO" in solution.read_text():
                yield f"{_short(solution)}: a TODO is left in the solution"
        for number in sorted(set(exercise.todos) - found):
            yield f"{exercise.name}: goal {number} has no TODO {number} in any file of the exercise"
        for number in sorted(found - set(exercise.todos)):
            yield f"{exercise.name}: TODO {number} has no goal in exercises.toml"


def given_away() -> Iterator[str]:
    """Find hints that contain a line of the solution."""
    for exercise in exercises():
        if not all(path.is_file() for pair in exercise.pairs for path in pair):
            continue
        given, solution = ("".join(path.read_text() for path in paths) for paths in zip(*exercise.pairs, strict=True))
        for goal, hints in exercise.hints.items():
            for line in lines_given_away(hints, solution, given):
                yield f"{exercise.name}: a hint of goal {goal} contains a line of the solution: {line}"


def lines_given_away(hints: tuple[str, ...], solution: str, exercise: str = "") -> list[str]:
    """Return the lines of a solution that a hint contains and the exercise does not."""
    lines = {line.strip() for line in solution.splitlines()} - {line.strip() for line in exercise.splitlines()}
    return sorted(line for line in lines if len(line) >= SHORTEST and any(line in hint for hint in hints))


def unlisted() -> Iterator[str]:
    """Find files that are named like an exercise or a solution but that no exercises.toml lists."""
    root = require_stages()
    listed = {path for exercise in exercises() for pair in exercise.pairs for path in pair}
    for folder in {exercise.path.parent for exercise in exercises()}:
        for place in (folder, root / "solutions" / folder.name):
            for path in sorted(place.glob("exercise[0-9]*")):
                if path not in listed and ".mine-" not in path.name and path.suffix in (".py", ".sh", ".json"):
                    yield f"{_short(path)}: {folder.name}/exercises.toml has no entry for it"


def untested_rules() -> Iterator[str]:
    """Find rules for which the tests contain no mistake."""
    tests = require_stages() / "tests"
    others = (tests / "check" / "test_endings.py", tests / "test_jobs.py")
    files = (*tests.glob("check/rules/test_*.py"), *tests.glob("check/bank/*.py"), *others)
    text = "\n".join(path.read_text() for path in files)
    for name, rule in RULES.items():
        if f'"{name}"' not in text:
            yield f"rule {name}: add a mistake of this kind to tests/check/rules/test_{rule.family}.py"


def notebooks_with_outputs() -> Iterator[str]:
    """Find exercise notebooks that were saved with outputs."""
    root = require_stages()
    for path in sorted(root.glob("*/*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        if any(cell["outputs"] or cell["execution_count"] for cell in code):
            yield f"{_short(path)}: it has outputs; clear them (in Jupyter: Edit, Clear Outputs of All Cells)"


LOOKS: tuple[Callable[[], Iterator[str]], ...] = (
    without_todo,
    given_away,
    unlisted,
    untested_rules,
    notebooks_with_outputs,
    wrong_links,
    unexplained_terms,
    unmeasured_figures,
)


# ---------------------------------------------------------------- by running an exercise


def judged(exercise: Exercise) -> Iterator[str]:
    """Run the quick part of the check: the exercise as delivered must fail, and its solution must pass."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / exercise.path.parent.name
        place.mkdir()
        unsolved = todo.write_version(exercise, set(), place)
        *_, verdict = check_file(unsolved, quick=True)
        if not verdict.errors:
            yield f"{exercise.name}: the unsolved exercise passes the check"
        elif verdict.first_open == 0:
            yield f"{exercise.name}: unsolved, the check first finds {verdict.errors[0].kind}, which belongs to no TODO"
    *_, verdict = check_file(exercise.solution, quick=True)
    for finding in verdict.errors[:1]:
        yield f"{_short(exercise.solution)}: the check of the solution finds {finding.kind}: {finding.seen}"


def _short(path: Path) -> str:
    return os.path.relpath(path, require_stages())
