"""A process: how it started, what it raised, and that it reached its end."""

import io
import multiprocessing.process
import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch.multiprocessing.spawn  # noqa: F401 - its module is patched below

from workshop.check.evidence.events import Ended, Exited, Raised, Started
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe
from workshop.check.probes.recorder import Recorder

MESSAGE, TRACEBACK = 2000, 4000  # characters that are kept


class Processes(Probe):
    """Notes when a process starts, fails and ends. (``Exited`` is noted where the program is run.)"""

    writes = (Started, Raised, Exited, Ended)
    always = True

    def __init__(self, recorder: Recorder):
        super().__init__(recorder)
        self.installed = False

    def install(self) -> None:
        """Note this process, and those that it starts."""
        self.installed = True
        self._started()
        os.register_at_fork(after_in_child=self._forked)
        # What a process that the program starts raises: multiprocessing prints it, torch hands it to the parent.
        self.patches.wrap(multiprocessing.process.BaseProcess, "run", self._run)
        # (The attribute torch.multiprocessing.spawn is the function that hides this module.)
        self.patches.wrap(sys.modules["torch.multiprocessing.spawn"], "_wrap", self._wrap)

    def undo(self) -> None:
        """Put everything back; a function that is called at each fork cannot be removed, so it does nothing from now on."""
        self.installed = False
        super().undo()

    def _forked(self) -> None:
        if self.installed:
            self.recorder.open()
            self._started()

    def _started(self) -> None:
        rank, local_rank = (self.recorder.environment.get(name) for name in ("RANK", "LOCAL_RANK"))
        self.recorder.note(Started(parent=os.getppid(), rank=rank, local_rank=local_rank))

    def _run(self, original: Function) -> Function:
        def run(process: multiprocessing.process.BaseProcess) -> None:
            try:
                original(process)
            except SystemExit:
                raise
            except BaseException as error:
                note_exception(self.recorder, error)
                raise
            finally:
                self.recorder.end()
                self.recorder.note(Ended())

        return run

    def _wrap(self, original: Function) -> Function:
        def wrap(function: Function, index: int, arguments: tuple[object, ...], *rest: object) -> object:
            def noting(*given: object) -> None:
                try:
                    function(*given)
                except SystemExit:
                    raise
                except BaseException as error:
                    note_exception(self.recorder, error)
                    raise

            return original(noting, index, arguments, *rest)

        return wrap


def note_exception(recorder: Recorder, error: BaseException) -> None:
    """Note an exception with the last line of the program that it came through, and print it."""
    with recorder.guard:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == recorder.script]
        line = own[-1].lineno if own else None
        if isinstance(error, SyntaxError) and error.filename == recorder.script:
            line = error.lineno
        text = io.StringIO()
        traceback.print_exception(error, file=text)
        recorder.note(
            Raised(
                type=type(error).__name__,
                message=re.sub(r"\s+", " ", str(error)).strip()[:MESSAGE],
                traceback=text.getvalue()[-TRACEBACK:],
                where=f"{Path(recorder.script).name}:{line}" if line else "",
            )
        )
        with suppress(BaseException):
            sys.stderr.write(text.getvalue())
