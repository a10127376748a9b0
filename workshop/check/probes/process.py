"""A process: how it started, its exceptions, and its end."""

import inspect
import itertools
import multiprocessing.process
import os
import re
import sys
import traceback
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.multiprocessing.spawn  # its module is patched below
from torch.optim import Optimizer

from workshop.check.evidence.events import Ended, Exited, Raised, Started, Stopped
from workshop.check.evidence.misuses import SharedChanged
from workshop.check.probes.files import tensors_in
from workshop.check.probes.probe import Function, Probe, around, on
from workshop.check.probes.recorder import Recorder
from workshop.run.failures import is_echo

TENSORS = 100  # of an argument of a spawned function that are looked at
MESSAGE, TRACEBACK = 2000, 4000  # characters that are kept


class Processes(Probe):
    """Notes when a process starts, fails and ends. (``Exited`` is noted where the program is run.)"""

    writes = (Started, Raised, Exited, Ended, Stopped, SharedChanged)

    def clear(self) -> None:
        # The tensors among the arguments of a spawned function: the name of the argument, the tensor, and its version.
        self.shared: list[tuple[str, torch.Tensor, int]] = []

    def install(self) -> None:
        super().install()
        self._started()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        if self.installed:  # a hook for forks cannot be removed
            self.recorder.open()
            self._started()

    def _started(self) -> None:
        rank, local_rank = (self.recorder.environment.get(name) for name in ("RANK", "LOCAL_RANK"))
        self.recorder.note(Started(parent=os.getppid(), rank=rank, local_rank=local_rank))

    # Exceptions in processes that the program starts: multiprocessing prints them, torch passes them to the parent.
    @around(multiprocessing.process.BaseProcess, "run")
    def _run(self, original: Function, process: multiprocessing.process.BaseProcess) -> None:
        try:
            self._call(original, process)
        finally:
            self.recorder.call(self.recorder.at_end)
            self.recorder.note(Ended())

    # (sys.modules, because the attribute torch.multiprocessing.spawn is a function that hides the module.)
    @around(sys.modules["torch.multiprocessing.spawn"], "_wrap")
    def _wrap(self, original: Function, function: Function, *args: Any) -> Any:
        with self.recorder.guard:
            names = list(inspect.signature(function).parameters)[1:]  # the first one is the rank
            for name, value in zip(names, args[1], strict=False):
                tensors = (each for each in tensors_in(value) if each.is_shared() and not each.requires_grad)
                self.shared += [(name, each, each._version) for each in itertools.islice(tensors, TENSORS)]
        return original(partial(self._call, function), *args)

    @on("before_step")
    def _look_at_shared(self, optimizer: Optimizer) -> None:
        changed = {name for name, tensor, version in self.shared if tensor._version != version}
        self.shared = []
        for name in sorted(changed):
            self.note_here(SharedChanged(name=name))

    def _call(self, function: Function, *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            if not isinstance(error, SystemExit):
                note_exception(self.recorder, error)
            raise


def note_exception(recorder: Recorder, error: BaseException, when: str = "") -> None:
    """Record an exception with the last line of the program in its traceback, and print it; ``when`` is added to its message."""
    with recorder.guard:
        error = _cause(error)
        lines = [(recorder.own(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError):
            lines.append((recorder.own(error.filename or ""), error.lineno))
        message = re.sub(r"\s+", " ", str(error)).strip()[:MESSAGE]
        if isinstance(error, NameError) and error.name in recorder.of_parent:
            when = " in a process that spawn has started"
        message += when
        where = next((f"{name}:{line}" for name, line in reversed(lines) if name and line), "")
        stack = "".join(traceback.format_exception(error))
        recorder.note(Raised(type=type(error).__name__, message=message, traceback=stack[-TRACEBACK:], where=where))
        with suppress(BaseException):
            sys.stderr.write(stack)


def _cause(error: BaseException) -> BaseException:
    """The exception that ended the program, if a clean-up such as destroy_process_group() failed after it."""
    while isinstance(error, AssertionError) or is_echo(str(error), type(error).__name__):
        before = error.__context__
        if before is None or error.__suppress_context__ or isinstance(before, (KeyboardInterrupt, SystemExit)):
            break
        error = before
    return error
