"""``workshop test``: the test-suite."""

import importlib.util
import subprocess
import sys

from workshop.errors import UserError
from workshop.repository import require_stages, requirements


def run_tests(full: bool, arguments: list[str]) -> int:
    """Run pytest in the repository and return its exit status.

    Args:
        full: also the tests marked ``full``.
        arguments: further arguments of pytest.

    Raises:
        UserError: the tests' own packages are missing (in an environment that WORKSHOP_PYTHON names, say).
    """
    needed = requirements("notebooks") + requirements("development")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"the tests need {', '.join(missing)}: {sys.executable} -m pip install -e '{require_stages()}[notebooks,development]'"
        )
    # Most tests wait for processes to start: two files at a time.
    marks = ["--numprocesses=2", "--dist=loadfile"] + ([] if full else ["-m", "not full"])
    return subprocess.call([sys.executable, "-m", "pytest", *marks, *arguments], cwd=require_stages())
