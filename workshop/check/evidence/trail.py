"""The trail of a process: which lines of the program's own files it ran, in order, and what it saw there.

Only a second run of a program whose ranks have diverged has trails, because tracing is slow.
"""

import json
import mmap
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from workshop.check.evidence.events import Sketch

ENTRIES = 1 << 18  # lines that are kept, the latest ones
SLOT = 512  # bytes of a note of what a process saw at a line
LATEST, EACH = 1 << 14, 1 << 11  # number of notes that are kept: the latest ones, and the last one of each line
BYTES = 8 * (ENTRIES + 1)  # of the file of the entries, which begins with their number


class Called(NamedTuple):
    """A call of a function of a library."""

    number: int  # of entries before it
    place: tuple[str, int]  # the file and line that call it
    name: str
    arguments: dict[str, str]


class Change(NamedTuple):
    """A moment at which a line of the program has made, changed or used a model."""

    what: str  # "changed" or "used"
    model: int  # its number, in the order in which the program made them
    steps: int  # of the process before it
    number: int  # of entries before it
    places: list[
        tuple[str, int, int]
    ]  # lines of the running functions, the innermost first; first and last line of each
    sketches: list[Sketch]  # of its parameters after that
    buffers: list[Sketch]  # without those of BatchNorm


class Trail(NamedTuple):
    """The trail of a process. It is no part of recorded evidence."""

    files: tuple[str, ...]
    entries: tuple[int, ...]  # see ``entry``
    sources: dict[str, str]  # the text of each file
    first: int  # the number of the first entry
    values: dict[int, dict[str, str]]  # for the number of an entry, what the names in its statement were
    calls: list[Called]
    changes: list[Change]


NO_TRAIL = Trail((), (), {}, 0, {}, [], [])
CHANGES = "changes"  # the beginning of the name of a file


def entry(file: int, depth: int, line: int) -> int:
    """A line of a file with this index, in a function below ``depth`` functions of the program; 0: it returns."""
    return (file + 1) << 48 | min(max(depth, 0), 0xFFFF) << 32 | line


def mark(events: int) -> int:
    """The moment at which a process has noted this number of events."""
    return events


def parts(made: int) -> tuple[int, int, int]:
    """Return file, depth and line of an entry; the file of a mark is -1, and its line the number of events."""
    return (made >> 48) - 1, made >> 32 & 0xFFFF, made & 0xFFFFFFFF


def read_trail(folder: Path, pid: int) -> Trail:
    """Read the trail of a process from its files; it may have been killed at any moment."""
    with suppress(OSError, ValueError):
        paths = dict(line.split("\t", 1) for line in (folder / f"sources-{pid}").read_text().splitlines())
        sources = {}
        for name, path in paths.items():
            with suppress(OSError, UnicodeDecodeError):
                sources[name] = Path(path).read_text()
        ring = memoryview((folder / f"lines-{pid}").read_bytes()).cast("Q")
        count = ring[0]
        latest = range(max(0, count - ENTRIES), count)
        entries = tuple(ring[1 + number % ENTRIES] for number in latest)
        trail = Trail(tuple(paths), entries, sources, latest.start, {}, [], _changes(folder / f"{CHANGES}-{pid}"))
        slots = (folder / f"values-{pid}").read_bytes()
        for start in range(0, len(slots), SLOT):
            with suppress(ValueError):
                number, file, line, name, said = json.loads(slots[start : start + SLOT].rstrip(b"\0"))
                if name:
                    trail.calls.append(Called(number, (file, line), name, said))
                else:
                    trail.values[number] = said
        return trail
    return NO_TRAIL


def _changes(path: Path) -> list[Change]:
    found = []
    with suppress(OSError, ValueError):  # there is no such file, or the process was killed while it wrote a line
        for line in path.read_text().splitlines():
            said = json.loads(line)
            places = [(where, first, last) for where, first, last in said.pop("places")]
            parameters, buffers = (
                [each and (each[0], each[1]) for each in said.pop(of)] for of in ("sketches", "buffers")
            )
            found.append(Change(**said, places=places, sketches=parameters, buffers=buffers))
    return found


def mapped(path: Path, size: int) -> memoryview:
    """Map a new file into memory: what is written there is in the file, even if the process is killed."""
    with path.open("wb+") as file:
        file.truncate(size)
        return memoryview(mmap.mmap(file.fileno(), size))
