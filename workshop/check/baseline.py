"""Remove from a verdict what its owner ignores or already knows."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from workshop.check.places import place_of
from workshop.check.reports import save
from workshop.check.settings import Settings
from workshop.check.verdict import Finding, Verdict
from workshop.errors import UserError


class Known(NamedTuple):
    """What identifies a finding of a baseline. Lines that are added above it do not change its place."""

    kind: str
    path: str  # relative to the folder in which the program starts
    line: str  # its text; "" if the finding names no line


def sieve(settings: Settings) -> Callable[[Verdict], Verdict]:
    """Return a function that moves the findings which are not reported, and writes the baseline if the owner asks for it.

    Raises:
        UserError: the baseline cannot be read.
    """
    file = settings.write_baseline or settings.baseline
    known = read_baseline(file) if file and not settings.write_baseline else set()

    def sift(verdict: Verdict) -> Verdict:
        ignored = [finding for finding in verdict.findings if finding.kind in settings.ignore]
        others = {
            finding: _known(finding, verdict, settings.folder) for finding in verdict.findings if finding not in ignored
        }
        # A run that cannot be judged shows only some findings, so it makes no baseline.
        writes = settings.write_baseline if verdict.judged else None
        if writes and verdict.complete:
            write_baseline(writes, set(others.values()))
        old = [finding for finding, place in others.items() if writes or place in known]
        new = [finding for finding in others if finding not in old]
        return replace(verdict, findings=new, ignored=ignored, known=old, baseline=file)

    return sift


def _known(finding: Finding, verdict: Verdict, folder: Path) -> Known:
    place = place_of(finding, verdict.subject.file, folder)
    path = Path(os.path.relpath(place.file, folder.resolve())).as_posix()
    return Known(finding.kind, path, place.text.strip())


def write_baseline(file: Path, known: set[Known]) -> None:
    """Write a baseline.

    Raises:
        UserError: the file cannot be written.
    """
    content = {"findings": [each._asdict() for each in sorted(known)]}
    save(file, json.dumps(content, indent=2) + "\n")


def read_baseline(file: Path) -> set[Known]:
    """Read a baseline.

    Raises:
        UserError: the file is missing or has different contents.
    """
    try:
        found = {Known(**each) for each in json.loads(file.read_text())["findings"]}
        if not all(isinstance(text, str) for each in found for text in each):
            raise TypeError("each value must be a string")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; --write-baseline writes a baseline") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} is not a baseline; --write-baseline writes one") from error
    return found
