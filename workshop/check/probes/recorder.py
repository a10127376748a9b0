"""The notes of one process of a checked program, and what its probes share.

Each process appends its events to a file of its own with ``os.write``, so the events before a crash or a hang are kept.
"""

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.optim import Optimizer

from workshop.check.evidence.events import Event, Key, Loader
from workshop.check.evidence.run import Process

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
READ = 1_000_000  # bytes of a process's output that are kept


@dataclass
class Batch:
    """A batch that a loader returned: its samples, its first row, the address of its memory, and the loader."""

    keys: list[Key]
    row: list[Key] | None
    pointer: int
    loader: Loader


class _Guard:
    """Keeps errors of a probe's own code from the program."""

    def __init__(self, failed: Callable[[Exception], None]):
        self._failed = failed

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self._failed(error)
            return True
        return False


class Recorder:
    """Takes the notes of this process. Nothing is noted before ``open``.

    Args:
        folder: where the files of events and of output go, one of each for a process.
        script: the program that is checked; "where" always names a line of it.
        scratch: the folder that the program may write to.

    Attributes:
        environment: what the launcher has set.
        guard: a context for a probe's own code: an error in it does not reach the program, and is kept in a file.
        quiet: above 0 inside a call of a library that itself calls what is recorded.
        in_backward: whether a backward pass is running.
        starting: whether a library starts, which leaves files of its own.
        saved: whether this process has saved a checkpoint.
        fitting: whether Lightning's Trainer is training.
        steps: how many optimizer steps this process has taken.
        model: the model of the last forward pass.
        names: the id of each parameter of the models so far, and its name.
        take_batch: gives the batch of a loader that an input came from.
        at_step: what the check does to the program at the beginning of a step: it can end it there.
        before_step, after_step: called around each optimizer step.
        after_module: called with each module that was called, and its output.
        around_forward: contexts for the forward pass of a whole model.
        at_end: called when the process ends.
        after_fork: called in a forked process when its own files are open.
    """

    def __init__(self, folder: Path, script: Path, scratch: Path):
        self.folder, self.script, self.scratch = folder, str(script), scratch
        self.environment: dict[str, str | None] = {}
        self.guard: AbstractContextManager[None, bool] = _Guard(self._failed)
        self.quiet = 0
        self.in_backward = self.starting = self.saved = self.fitting = False
        self.take_batch: Callable[[torch.Tensor], Batch | None] = lambda tensor: None
        self.at_step: Callable[[], None] = lambda: None
        self.before_step: list[Callable[[Optimizer], None]] = []
        self.after_step: list[Callable[[Optimizer], None]] = []
        self.after_module: list[Callable[[nn.Module, object], None]] = []
        self.around_forward: list[Callable[[], AbstractContextManager[object]]] = []
        self.at_end: list[Callable[[], None]] = []
        self.after_fork: list[Callable[[], None]] = []
        self._events: int | None = None
        self._clear()

    def _clear(self) -> None:
        self.steps = 0
        self.model: nn.Module | None = None
        self.names: dict[int, str] = {}

    def open(self) -> None:
        """Begin the files of this process: at the start, and in each process that is forked."""
        self._events = self._file("events")
        stacks = self._file("stacks")
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = self._file(name)
            os.dup2(file, number)
            os.close(file)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False, chain=False)
        self.environment = {name: os.environ.get(name) for name in LAUNCHER}
        self._clear()
        for call in self.after_fork:
            call()

    def _file(self, name: str) -> int:
        return os.open(self.folder / f"{name}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: Event) -> None:
        """Append an event."""
        if self._events is not None:
            # A full disk, and a program that has closed all descriptors, are no errors of the line that is noted.
            with suppress(OSError):
                os.write(self._events, pickle.dumps((time.monotonic(), event)))  # all processes have the same clock

    def where(self) -> str:
        """The line of the program that we are called from, as "file.py:12"."""
        frame: FrameType | None = sys._getframe(1)
        while frame:
            if frame.f_code.co_filename == self.script:
                return f"{Path(self.script).name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def called_by_script(self) -> bool:
        """Whether the program itself calls the function that asks, and not a library."""
        return sys._getframe(2).f_code.co_filename == self.script

    def each_step(self, calls: list[Callable[[Optimizer], None]], optimizer: Optimizer) -> None:
        """Make the calls of ``before_step`` or ``after_step``."""
        for call in calls:
            with self.guard:
                call(optimizer)

    def end(self) -> None:
        """Note what was left to note when the process ended."""
        for call in self.at_end:
            with self.guard:
                call()

    def _failed(self, error: Exception) -> None:
        with suppress(OSError):
            file = self._file("failures")
            os.write(file, "".join(traceback.format_exception(error)).encode())
            os.close(file)


def read_process(folder: Path, pid: int) -> Process:
    """The process with this id, from its files in ``folder``."""
    events: list[tuple[float, Event]] = []
    with open(folder / f"events-{pid}", "rb") as file:
        while True:
            try:
                events.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):  # the last one may be cut short
                break

    def text(name: str) -> str:
        path = folder / f"{name}-{pid}"
        return path.open("rb").read(READ).decode(errors="replace") if path.exists() else ""

    return Process(pid, events, text("stdout"), text("stderr"), text("stacks"))


def read_failures(folder: Path) -> str:
    """The tracebacks of the errors in the probes' own code; "" where there were none."""
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("failures-*")))
