"""The notes of one process of a checked program, in files of its own, and what its probes share."""

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

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


class Recorder:
    """Takes the notes of this process: in files in ``folder``, and none before ``open``."""

    def __init__(self, folder: Path, script: Path, scratch: Path):
        self.folder, self.script = folder, str(script)  # "where" always names a line of the script
        self.scratch = scratch  # the folder that the program may write to
        self.environment: dict[str, str | None] = {}  # what the launcher has set
        self.quiet = 0  # above 0 inside a call of a library that itself calls what is recorded
        self.in_backward = False  # whether a backward pass is running
        self.starting = False  # whether a library starts, which leaves files of its own
        self.saved = False  # whether this process has saved a checkpoint
        self.fitting = False  # whether Lightning's Trainer is training
        self.take_batch: Callable[[torch.Tensor], Batch | None] = lambda tensor: None  # the batch of an input
        self.at_step: Callable[[], None] = lambda: None  # called when a step begins: it can end the program
        self.before_step: list[Callable[[Optimizer], None]] = []
        self.after_step: list[Callable[[Optimizer], None]] = []
        self.after_module: list[Callable[[nn.Module, object], None]] = []  # each module that was called, and its output
        self.around_forward: list[Callable[[], AbstractContextManager[object]]] = []  # of a whole model
        self.at_end: list[Callable[[], None]] = []  # when the process ends
        self.after_fork: list[Callable[[], None]] = []  # in a forked process, when its own files are open
        self._events: int | None = None

    def open(self) -> None:
        """Begin the files of this process: at the start, and in each process that is forked."""
        self._events = self._file("events")
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = self._file(name)
            os.dup2(file, number)
            os.close(file)
        faulthandler.register(signal.SIGUSR1, file=self._file("stacks"), all_threads=False, chain=False)
        self.environment = {name: os.environ.get(name) for name in LAUNCHER}
        self.steps = 0  # of optimizers, in this process
        self.model: nn.Module | None = None  # of the last forward pass
        self.names: dict[int, str] = {}  # of the parameters of the models so far, by their ids
        for call in self.after_fork:
            call()

    def _file(self, name: str) -> int:
        return os.open(self.folder / f"{name}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: Event) -> None:
        """Append an event, with ``os.write``: so the events before a crash or a hang are kept."""
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

    @property
    @contextmanager
    def guard(self) -> Iterator[None]:
        """A context for a probe's own code: an error in it does not reach the program, and is kept in a file."""
        try:
            yield
        except Exception as error:
            with suppress(OSError):
                file = self._file("failures")
                os.write(file, "".join(traceback.format_exception(error)).encode())
                os.close(file)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """A context for a call of a library that itself calls what is recorded."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def call(self, calls: Iterable[Callable[..., None]], *args: object) -> None:
        """Make the calls of ``before_step``, say, each in the guard."""
        for call in calls:
            with self.guard:
                call(*args)


def read_process(folder: Path, pid: int) -> Process:
    """The process with this id, from its files in ``folder``."""
    events: list[tuple[float, Event]] = []
    # The last one may be cut short.
    with open(folder / f"events-{pid}", "rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            events.append(pickle.load(file))
    paths = [folder / f"{name}-{pid}" for name in ("stdout", "stderr", "stacks")]
    texts = [path.open("rb").read(READ).decode(errors="replace") if path.exists() else "" for path in paths]
    return Process(pid, events, *texts)
