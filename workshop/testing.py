"""``workshop test``: the test-suite."""

import subprocess
import sys

from workshop.repository import require_stages


def run_tests(full: bool, arguments: list[str]) -> int:
    """Run pytest in the repository and return its exit status.

    Args:
        full: also the tests marked ``full``.
        arguments: further arguments of pytest.
    """
    # Most tests wait for processes to start: two files at a time. The kills of the long runs want the machine for themselves.
    marks = [] if full else ["-m", "not full", "--numprocesses=2", "--dist=loadfile"]
    return subprocess.call([sys.executable, "-m", "pytest", *marks, *arguments], cwd=require_stages())
