"""Write the reports for other programs."""

from pathlib import Path

from workshop.check.junit import as_junit
from workshop.check.sarif import as_sarif
from workshop.check.verdict import Verdict
from workshop.errors import UserError
from workshop.files import write_atomically


def write_reports(verdict: Verdict, folder: Path, junit: Path | None, sarif: Path | None) -> None:
    """Write a verdict as JUnit XML and as SARIF, into the files that are given.

    Raises:
        UserError: a file cannot be written.
    """
    if junit:
        save(junit, as_junit(verdict))
    if sarif:
        save(sarif, as_sarif(verdict, folder))


def save(file: Path, content: str) -> None:
    """Write a file atomically.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_atomically(file, content)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error
