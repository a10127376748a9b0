"""The trail of a process: which lines of the program's own files it ran, in order, and what it saw there.

Only a second run of a program whose ranks have diverged has trails, because tracing is slow.
"""

import json
import mmap
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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


class Trail(NamedTuple):
    """The trail of a process. It is no part of recorded evidence."""

    files: tuple[str, ...]
    entries: tuple[int, ...]  # see ``entry``
    sources: dict[str, str]  # the text of each file
    first: int  # the number of the first entry
    values: dict[int, dict[str, str]]  # for the number of an entry, what the names in its statement were
    calls: list[Called]


NO_TRAIL = Trail((), (), {}, 0, {}, [])


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
        trail = Trail(tuple(paths), entries, sources, latest.start, {}, [])
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


def mapped(path: Path, size: int) -> memoryview:
    """Map a new file into memory: what is written there is in the file, even if the process is killed."""
    with path.open("wb+") as file:
        file.truncate(size)
        return memoryview(mmap.mmap(file.fileno(), size))
