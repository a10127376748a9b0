"""Record the events of one process of a checked program in its own files; the probes share its state."""

import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from workshop.check.evidence.events import Event, Key, Loader, Stopped
from workshop.check.evidence.process import Process
from workshop.check.evidence.reductions import read_reductions
from workshop.check.evidence.trail import read_trail

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
BEYOND = 2  # steps of the epoch after the one that a long run still ends
READ = 1_000_000  # bytes kept of the output of a process


@dataclass
class Batch:
    """A batch that a loader returned: its samples, its first row, the address of its memory, and the loader."""

    keys: list[Key]
    row: list[Key] | None
    pointer: int
    loader: Loader


class Recorder:
    """Records the events of this process in files in ``folder``, after ``open`` was called."""

    def __init__(self, folder: Path, script: Path, scratch: Path, root: Path | None = None):
        self.folder, self.script = folder, str(script)
        self.root = f"{os.path.realpath(root)}{os.sep}" if root else ""  # the folder of the program's own modules
        self.scratch = scratch  # the folder that the program may write to
        self.around = ""  # the folder that also has copies of what is beside the program, such as ../package
        self.of_parent: set[str] = (
            set()
        )  # in a process that spawn has started: the variables of the main module of its parent
        self.original: Path | None = None  # the folder that ``scratch`` copies, with links to large files
        self.environment: dict[str, str | None] = {}  # what the launcher has set
        self.guarding = 0  # above 0 in the code of a probe
        self.quiet = 0  # above 0 inside a library call that itself calls recorded functions
        self.in_backward = False  # whether a backward pass is running
        self.in_forward = False  # whether a forward pass of a model is running
        self.unscaled: Callable[[torch.Tensor | None], float] = lambda loss: 1.0  # what a GradScaler multiplied it with
        self.starting = False  # whether a library is starting, which writes its own files
        self.received = (
            False  # whether the program may have got objects from another rank: by a collective, or by a file
        )
        self.warmup = (
            0  # the steps before a model is wrapped: rank 0 alone may train a teacher; at first those of an earlier run
        )
        self.saved = 0  # number of checkpoints that this process has saved
        self.fitting = False  # whether Lightning's Trainer is training
        self.take_batch: Callable[[torch.Tensor], Batch | None] = lambda tensor: None  # the batch of an input
        self.at_step: Callable[[], None] = lambda: None  # called when a step begins; it can end the program
        self.before_forward: list[Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]] = []  # of a whole model
        self.before_backward: list[Callable[[torch.Tensor], None]] = []  # with the loss
        self.after_backward: list[Callable[[], None]] = []
        self.before_step: list[Callable[[Optimizer], None]] = []
        self.after_step: list[Callable[[Optimizer], None]] = []
        self.after_module: list[Callable[[nn.Module, object], None]] = []  # with each called module and its output
        self.before_evaluation: list[Callable[[nn.Module], None]] = []  # with a model that is called without gradients
        self.opens_batches = False  # whether the samples of a batch are also looked for in the attributes of an object
        self.parameters_given = False  # whether the last evaluation used parameters that another run can use too
        self.around_forward: list[Callable[[], AbstractContextManager[object]]] = []  # of a whole model
        self.at_end: list[Callable[[], None]] = []  # when the process ends
        self.noted: Callable[[], None] = lambda: None  # called after each event
        self.after_fork: list[Callable[[], None]] = []  # in a forked process, after its own files are open
        self._events: int | None = None

    def open(self) -> None:
        """Open the files of this process: at the start, and in each forked process."""
        self._events = self._file("events")
        self.count = 0  # of events in this file
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = self._file(name)
            os.dup2(file, number)
            os.close(file)
        faulthandler.register(signal.SIGUSR1, file=self._file("stacks"), all_threads=False, chain=False)
        self.environment = {name: os.environ.get(name) for name in LAUNCHER}
        self.steps = 0  # of optimizers, in this process
        self.wrapped = False  # a model, in DistributedDataParallel or fully_shard
        # Of the loader that has returned the last batch: its batches so far, their number in an epoch, and the steps before it.
        self.epoch = 0, 0, 0
        self.first_step = time.process_time()  # when it began
        self.model: nn.Module | None = None  # of the last forward pass
        self.names: dict[int, str] = {}  # of the parameters of the models so far, by their ids
        self.sharded = False  # whether a library shards the parameters or the gradients
        self.optimizers: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()  # the line that created each
        self.copies: dict[int, str] = {}  # the class of each copy of a model, by the address of its first parameter
        for call in self.after_fork:
            call()

    def _file(self, name: str) -> int:
        return os.open(self.folder / f"{name}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: Event, seconds: float | None = None) -> None:
        """Append an event with ``os.write``, which keeps the events before a crash or a hang; ``seconds``: its time."""
        if self._events is not None:
            # A full disk, or a program that closes all descriptors, must not raise an error in the observed line.
            with suppress(OSError):
                now = time.monotonic()  # all processes have the same clock
                os.write(self._events, pickle.dumps((now if seconds is None else seconds, event)))
                self.count += 1
                self.noted()

    @property
    def done(self) -> int:
        """The steps without the warmup."""
        return self.steps - self.warmup

    def wrap(self) -> None:
        """The program wraps or shards a model: the steps before the first time are a warmup."""
        if not self.wrapped:
            self.wrapped, self.warmup = True, self.steps

    def stop(self, after: float) -> None:
        """End this process, if the check has seen enough; all ranks end at the same step.

        Args:
            after: the seconds of computing since its first step after which this process decides it.
        """
        link = self.folder / "stop"  # to the number of the step; making a link is atomic
        if not link.is_symlink():
            if time.process_time() - self.first_step < after:
                return
            with suppress(FileExistsError):
                link.symlink_to(str(self.done + self._to_go() if after else self.done))
        if self.done < int(os.readlink(link)):
            return
        self.note(Stopped(steps=self.done))
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            # Otherwise a worker of a loader may wait for a lock that another one holds at its end.
            for worker in multiprocessing.active_children():
                worker.kill()
        os._exit(0)

    def _to_go(self) -> int:
        """The steps until a long run may end: if most of an epoch is over, until after the evaluation that may follow it."""
        done, length, first = self.epoch
        if 0 < done < length <= 2 * done and self.steps > first:
            return math.ceil((length - done) * (self.steps - first) / done) + BEYOND
        return 1

    def where(self, *outside: type) -> str:
        """Return the line of the program that led to this call, as "file.py:12"; not one in a method of these classes."""
        # To ask a frame for its variables, such as "self", would keep their values alive.
        own = {
            getattr(each, "__code__", None)
            for given in outside
            for kind in given.__mro__
            for each in vars(kind).values()
        }
        frame = next((each for each in self.frames() if each.f_code not in own), None)
        return f"{self.own(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""

    def frames(self) -> Iterator[FrameType]:
        """Yield the running functions of the program itself, the innermost first."""
        frame: FrameType | None = sys._getframe(1)
        while frame:
            if self.own(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back

    def called_by_program(self) -> bool:
        """Whether the program has called the observed function, and not a library, such as a sampler of torch."""
        frame: FrameType | None = sys._getframe(1)
        while frame and frame.f_globals.get("__name__", "").startswith("workshop.check.probes"):
            frame = frame.f_back
        return bool(frame and self.own(frame.f_code.co_filename))

    def own(self, file: str) -> str:
        """Return the name of a file of the program itself, as its owner knows it; "" for a file of a library."""
        if self.root and file.startswith(self.root) and "site-packages" not in file:
            return file[len(self.root) :]
        if self.around and file.startswith(self.around) and "site-packages" not in file:
            return os.path.relpath(file, self.root)
        return Path(file).name if file == self.script else ""

    def of_program(self, value: Any) -> bool:
        """Whether a value is an object of a class of the program."""
        if isinstance(value, (type, torch.Tensor)):
            return False
        made = next((each for each in vars(type(value)).values() if hasattr(each, "__code__")), None)
        return made is not None and bool(self.own(made.__code__.co_filename))

    @property
    @contextmanager
    def guard(self) -> Iterator[None]:
        """A context for the code of a probe: errors are written to a file and do not reach the program."""
        self.guarding += 1
        try:
            yield
        except Exception as error:
            with suppress(OSError):
                file = self._file("failures")
                os.write(file, "".join(traceback.format_exception(error)).encode())
                os.close(file)
        finally:
            self.guarding -= 1

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """A context for a library call that itself calls recorded functions."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def call(self, calls: Iterable[Callable[..., None]], *args: object) -> None:
        """Call each function of a list such as ``before_step`` in the guard."""
        for call in calls:
            with self.guard:
                call(*args)


def read_process(folder: Path, pid: int) -> Process:
    """Read the process with this id from its files in ``folder``."""
    events: list[tuple[float, Event]] = []
    with open(folder / f"events-{pid}", "rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            events.append(pickle.load(file))
    events.sort(key=itemgetter(0))
    paths = [folder / f"{name}-{pid}" for name in ("stdout", "stderr", "stacks")]
    texts = [path.open("rb").read(READ).decode(errors="replace") if path.exists() else "" for path in paths]
    stdout, stderr, stack = texts
    process = Process(pid, events, stdout, stderr, stack)
    process.trail, process.reductions = read_trail(folder, pid), read_reductions(folder, pid)
    return process
