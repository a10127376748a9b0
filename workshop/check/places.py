"""Find the line that a finding names in the files of a program."""

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from workshop.check.folder import ENTRIES, SKIPPED
from workshop.check.verdict import Finding


class Place(NamedTuple):
    """A line of a program."""

    file: Path  # full path
    line: int  # its number; 0 if only the file is known
    text: str  # the line


def place_of(finding: Finding, script: Path, folder: Path) -> Place:
    """Return the line that a finding names, or else the program without a line.

    Args:
        finding: the finding.
        script: the program.
        folder: the folder in which it starts.
    """
    name, _, number = finding.where.rpartition(":")
    if name and number.isdigit():
        for file in itertools.chain((folder / name, script.parent / name), _named(name, folder)):
            with suppress(OSError, UnicodeDecodeError, IndexError):
                return Place(file.resolve(), int(number), file.read_text().splitlines()[int(number) - 1])
    return Place(script, 0, "")


def _named(name: str, folder: Path) -> Iterator[Path]:
    """Yield the file with this name below a folder, if there is only one; the stack of a process has no folders."""
    found: list[Path] = []
    entries = 0
    for place, folders, files in os.walk(folder):
        entries += len(files)
        if entries > ENTRIES:
            return
        folders[:] = [each for each in folders if each not in SKIPPED and not Path(place, each, "pyvenv.cfg").exists()]
        found += [Path(place, name)] if name in files else []
    yield from found if len(found) == 1 else ()
