"""A process: how it started, its exceptions, and its end."""

import multiprocessing.process
import os
import re
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.multiprocessing.spawn  # noqa: F401 - its module is patched below

from workshop.check.evidence.events import Ended, Exited, Raised, Started
from workshop.check.probes.probe import Function, Probe, around
from workshop.check.probes.recorder import Recorder

MESSAGE, TRACEBACK = 2000, 4000  # characters that are kept


class Processes(Probe):
    """Notes when a process starts, fails and ends. (``Exited`` is noted where the program is run.)"""

    writes = (Started, Raised, Exited, Ended)

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
        return original(partial(self._call, function), *args)

    def _call(self, function: Function, *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            if not isinstance(error, SystemExit):
                note_exception(self.recorder, error)
            raise


def note_exception(recorder: Recorder, error: BaseException) -> None:
    """Record an exception with the last line of the program in its traceback, and print it."""
    with recorder.guard:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == recorder.script]
        line = own[-1].lineno if own else None
        if isinstance(error, SyntaxError) and error.filename == recorder.script:
            line = error.lineno
        message = re.sub(r"\s+", " ", str(error)).strip()[:MESSAGE]
        where = f"{Path(recorder.script).name}:{line}" if line else ""
        stack = "".join(traceback.format_exception(error))
        recorder.note(Raised(type=type(error).__name__, message=message, traceback=stack[-TRACEBACK:], where=where))
        with suppress(BaseException):
            sys.stderr.write(stack)
