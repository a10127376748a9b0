"""The style of the code: ruff, import-linter, mypy and shellcheck find nothing, and functions and files are short."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import runs

# The programs of this environment, which may not be activated.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
LONGEST_FUNCTION, LONGEST_FILE = 60, 500  # lines


def finds_nothing(program: str, *arguments: str | Path) -> None:
    """Run a checker in the repository, and fail with its output if it finds something."""
    path = shutil.which(program, path=PATH)
    assert path, f"{program} is not installed; it belongs to the extra 'development'"
    done = subprocess.run([path, *arguments], cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing(arguments):
    finds_nothing("ruff", *arguments)


def test_import_linter_finds_nothing():
    finds_nothing("lint-imports")


def test_mypy_finds_nothing():
    finds_nothing("mypy")


def test_shellcheck_finds_nothing():
    scripts = [runs.ROOT / ".ci" / "run", runs.ROOT / "tests" / "containers" / "apptainer", *runs.ROOT.glob("*.sh")]
    for folder in runs.ROOT.glob("[!.]*/"):
        if folder.name not in ("data", "runs"):  # these folders have the output of runs
            scripts += folder.rglob("*.sh")
    finds_nothing("shellcheck", *scripts)


def too_long(path: Path) -> list[str]:
    """Return messages about the file and its functions that have too many lines."""
    text, place = path.read_text(), path.relative_to(runs.ROOT)
    lines = len(text.splitlines())
    found = [f"{place}: {lines} lines, at most {LONGEST_FILE}"] if lines > LONGEST_FILE else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                found.append(f"{place}:{node.lineno}: {node.name} has {lines} lines, at most {LONGEST_FUNCTION}")
    return found


@pytest.mark.parametrize("folder", ["workshop", "tests"])
def test_functions_and_files_are_short(folder):
    paths = sorted((runs.ROOT / folder).rglob("*.py"))  # without the referee, which is in the style of other people
    found = [line for path in paths if "referee" not in path.parts for line in too_long(path)]
    assert not found, "\n".join(found)
