"""Run a program and note the time of each optimizer step: python -P -m workshop.measure.step_log FILE PROGRAM [ARGUMENT ...]

The program stays as it is. FILE gets one line for each step of each process: the time, the process, and the number of the
step. AdamW counts its steps, and a checkpoint contains this count, so the number of a repeated step occurs twice.
"""

import os
import runpy
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """An optimizer step: when it ended (``time.time``), the process that did it, and its number, from 1."""

    time: float
    process: int
    number: int


def note_steps(path: Path) -> None:
    """Append a line to a file after each optimizer step of this process."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # one write per line: no process interrupts another

    def note(optimizer, *_):
        if not any(group["lr"] for group in optimizer.param_groups):
            return  # not a step of the training: DCP creates the optimizer state in this way before it loads a checkpoint
        number = int(next(iter(optimizer.state.values()))["step"])
        os.write(file, f"{time.time()} {os.getpid()} {number}\n".encode())

    register_optimizer_step_post_hook(note)


def read_steps(path: Path) -> list[Step]:
    """Return the steps in a file, by time; empty if there is no such file."""
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return sorted(
        (Step(float(when), int(process), int(number)) for when, process, number in lines), key=lambda step: step.time
    )


def run(path: Path, program: str, arguments: list[str]) -> None:
    """Run a program as ``python PROGRAM ARGUMENTS`` does, and note its steps."""
    note_steps(path)
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).resolve().parent))  # as Python does for a program
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
