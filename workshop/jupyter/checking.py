"""``workshop check`` and ``workshop hint`` for the cells of a notebook."""

import os
import subprocess
import sys

from workshop.repository import ROOT, python_path


def check(file: str, *options: str) -> None:
    """``workshop check`` in a notebook: the same words, in a process of its own.

    Args:
        file: the program, from the current folder or from the repository's root.
        options: further options of the command.
    """
    _command("check", _find(file), *options)


def hint(file: str, goal: int | None = None) -> None:
    """``workshop hint`` in a notebook: the next of three hints for a goal; without one, for the first goal that is open."""
    _command("hint", _find(file), *([] if goal is None else [str(goal)]))


def _find(file: str) -> str:
    return file if os.path.exists(file) else str(ROOT / file)


def _command(*arguments: str) -> None:
    """Run the command, and print what it says while it says it."""
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
