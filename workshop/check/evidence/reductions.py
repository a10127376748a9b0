"""What the reductions of a program return, and the gradients of its steps: of a second run, and no part of recorded evidence."""

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FILE = "reductions"  # the beginning of the name of a file


class Reduction(NamedTuple):
    """A reduction, the beginning of a backward pass, or a step."""

    what: str  # "reduced", "backward" or "step"
    where: str  # the line of the program
    left: bool = False  # before a backward pass: the model has gradients of an earlier one
    sketches: tuple[tuple[float, list[float]] | None, ...] = ()  # of the result; of the gradients of the step


NO_REDUCTIONS: tuple[Reduction, ...] = ()


def read_reductions(folder: Path, pid: int) -> tuple[Reduction, ...]:
    """Read what the probe of a process has written; it may have been killed at any moment."""
    found = []
    with suppress(OSError, ValueError):
        for line in (folder / f"{FILE}-{pid}").read_text().splitlines():
            what, where, left, sketches = json.loads(line)
            found.append(Reduction(what, where, left, tuple(each and (each[0], each[1]) for each in sketches)))
    return tuple(found)
