"""``workshop check``: what a learner's program really does. See ``judge.py`` for the way through this folder."""

import os
import subprocess
import sys

from workshop.repository import ROOT


def check(file: str, *options: str) -> None:
    """``workshop check`` in a notebook: the same words, in a process of its own.

    Args:
        file: the program, from the current folder or from the repository's root.
        options: further options of the command.
    """
    path = file if os.path.exists(file) else str(ROOT / file)
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "workshop", "check", path, *options],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout, end="")
