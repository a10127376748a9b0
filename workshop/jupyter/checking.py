"""Run ``workshop check`` and ``workshop hint`` from notebook cells."""

import os
import subprocess
import sys

from workshop.repository import ROOT, python_path


def check(file: str, *options: str) -> None:
    """Run ``workshop check`` in a separate process, and print its output in the notebook.

    Args:
        file: the program, relative to the current folder or to the repository.
        options: additional options for the command.
    """
    _command("check", _find(file), *options)


def hint(file: str, goal: int | None = None) -> None:
    """Print the next of three hints for a goal; by default, for the first goal that is not met."""
    _command("hint", _find(file), *([] if goal is None else [str(goal)]))


def _find(file: str) -> str:
    return file if os.path.exists(file) else str(ROOT / file)


def _command(*arguments: str) -> None:
    """Run a command of the workshop, and print its output line by line."""
    environment = {
        **os.environ,
        "FORCE_COLOR": "1",
        "COLUMNS": "100",
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "WORKSHOP_NOTEBOOK": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "workshop", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for line in process.stdout or ():
            print(line, end="", flush=True)
    finally:  # also when the cell is interrupted
        process.terminate()
        process.wait()
