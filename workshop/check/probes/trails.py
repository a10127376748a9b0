"""Trails: which lines of its own files a process runs, what the names there are, and with what it calls libraries.

Tracing makes the program slower, so only a second run of a program whose ranks have diverged installs this probe.
"""

import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from workshop.check.evidence.trail import BYTES, EACH, ENTRIES, LATEST, SLOT, entry, mapped, mark
from workshop.check.probes import patching
from workshop.check.probes.contents import attributes
from workshop.check.probes.probe import Probe
from workshop.check.source import Statement, statements

LETTERS = 60  # of a value
FEW = 4  # a tensor with so few elements is shown with its values
OFTEN = 20_000  # visits of a line after which its values are not read any more
Trace = Callable[[FrameType, str, Any], Any]
REPLACED = patching.replacement.__code__.co_consts  # the code of the functions that stand for those of libraries


class Trails(Probe):
    """Traces the program's own files; the files of the evidence are mapped into memory, so they survive a kill."""

    names: tuple[str, ...] = ()

    tracing = False

    def install(self) -> None:
        super().install()
        self.recorder.noted = self._mark

    def clear(self) -> None:
        if self.tracing:  # this process was forked by a rank, for example to load data
            sys.settrace(None)
            self.recorder.noted = lambda: None

    def undo(self) -> None:
        super().undo()
        sys.settrace(None)
        self.recorder.noted = lambda: None

    def _begin(self) -> None:
        """Trace the functions of the program that are running and those that it calls from now on.

        Imports, which tracing would make several times slower, are over when a process has joined its group.
        """
        self.tracing = True
        self.files: dict[str, Trace | None] = {}  # for each file its trace function; None: it is of a library
        self.visits: Counter[tuple[str, int, bool]] = Counter()  # of a file and line, and whether it called a library
        self.slots: dict[tuple[str, int, bool], int] = {}  # the numbers of these lines
        self.count = self.depth = self.notes = 0
        folder, pid = self.recorder.folder, os.getpid()
        self.lines = mapped(folder / f"lines-{pid}", BYTES).cast("Q")
        self.seen = mapped(folder / f"values-{pid}", SLOT * (LATEST + EACH))
        self.sources = folder / f"sources-{pid}"
        frame: FrameType | None = sys._getframe()
        while frame:
            if trace := self._of(frame):
                self.depth += 1
                frame.f_trace = trace
            frame = frame.f_back
        sys.settrace(self._call)

    def _mark(self) -> None:
        if self.tracing:
            self._add(mark(self.recorder.count))
        elif dist.is_initialized() and sys.gettrace() is None:  # the program may run under a debugger
            with self.recorder.guard:
                self._begin()

    def _of(self, frame: FrameType) -> Trace | None:
        """The trace function of a running function, if it is one of the program."""
        path = frame.f_code.co_filename
        if path not in self.files:
            self.files[path] = self._file(path)
        return self.files[path]

    def _add(self, made: int) -> None:
        self.lines[1 + self.count % ENTRIES] = made
        self.count += 1
        self.lines[0] = self.count

    def _call(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        """Python calls this at each call of a function."""
        try:
            if trace := self._of(frame):
                self.depth += 1
                return trace
            caller = frame.f_back
            if caller and self.files.get(caller.f_code.co_filename):
                with suppress(TypeError, ValueError):  # arguments that the function does not take
                    self._library(frame, caller)
        except Exception:
            self._fail()
        return None

    def _fail(self) -> None:
        """End the tracing, so that an error of this probe does not reach the program."""
        with self.recorder.guard:
            sys.settrace(None)
            raise

    def _file(self, path: str) -> Trace | None:
        """Return the trace function of a file of the program, with the number and the statements of the file."""
        name = self.recorder.own(path)
        if not name:
            return None
        index = sum(each is not None for each in self.files.values())
        with self.sources.open("a") as file:
            file.write(f"{name}\t{os.path.abspath(path)}\n")
        known: dict[int, Statement] = {}
        if os.path.isfile(path):
            known = statements(Path(path).read_text())

        def trace(frame: FrameType, event: str, argument: Any) -> Trace:
            try:
                self._look(frame, event)
                if event == "line":
                    line = frame.f_lineno
                    self._add(entry(index, self.depth, line))
                    statement = known.get(line)
                    if statement and statement.reads:
                        self._values(name, statement, frame)
                elif event == "return":
                    self._add(entry(index, self.depth, 0))
                    self.depth -= 1
            except Exception:
                self._fail()
            return trace

        return trace

    def _look(self, frame: FrameType, event: str) -> None:
        """Look at a running function of the program before its next line, and when it returns."""

    def _shown(self, value: object) -> str:
        return shown(value)

    def _values(self, name: str, statement: Statement, frame: FrameType) -> None:
        of, outer = frame.f_locals, frame.f_globals
        self._keep(name, frame.f_lineno, "", ((each, _value(each, of, outer)) for each in statement.reads))

    def _library(self, frame: FrameType, caller: FrameType) -> None:
        """Keep the arguments with which the program calls a function of a library."""
        arguments, called = dict(frame.f_locals), frame.f_code.co_name
        if frame.f_code in REPLACED:
            original = arguments["original"]
            called = getattr(original, "__name__", called)
            bound = inspect.signature(original).bind(*arguments["args"], **arguments["kwargs"])
            arguments = dict(bound.arguments)
        for more, inner in list(arguments.items()):
            if more == "kwargs" and isinstance(inner, dict):
                arguments |= arguments.pop(more)
            elif more == "args" and isinstance(inner, tuple):
                arguments |= {f"{number}": each for number, each in enumerate(arguments.pop(more), 1)}
        self._keep(self.recorder.own(caller.f_code.co_filename), caller.f_lineno, called, arguments.items())

    def _keep(self, name: str, line: int, called: str, found: Iterable[tuple[str, object]]) -> None:
        """Note what can be said in few letters about the last entry, or about a call of a library."""
        self.visits[name, line, bool(called)] += 1
        if self.visits[name, line, bool(called)] > OFTEN:
            return
        said = {str(each): text for each, value in found if (text := self._shown(value))}
        number = self.count if called else self.count - 1
        while len(content := json.dumps([number, name, line, called, said]).encode()) > SLOT:
            if not said:
                return
            said.popitem()
        of_line = self.slots.setdefault((name, line, bool(called)), len(self.slots)) % EACH
        for slot in (self.notes % LATEST, LATEST + of_line):
            self.seen[slot * SLOT : (slot + 1) * SLOT] = content.ljust(SLOT, b"\0")
        self.notes += 1


def _value(name: str, of: dict[str, Any], outer: dict[str, Any]) -> object:
    """The value of a name such as "state.step"; attributes are read without calling code of the program."""
    first, *inner = name.split(".")
    value = of[first] if first in of else outer.get(first, _value)
    for each in inner:
        value = attributes(value).get(each, _value)
    return value


def shown(value: object) -> str:
    """Return a value in a few letters that differ if the values of two ranks do; "" if that says nothing."""
    if value is None or isinstance(value, (bool, int, float, torch.Size)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return repr(str(value)[-LETTERS:])  # paths differ at their ends
    if isinstance(value, torch.Tensor):
        shape, base = list(value.shape), torch._C.TensorBase
        if type(value) is torch.Tensor and value.numel() <= FEW and base.is_cpu.__get__(value):
            return str(base.tolist(base.detach(value)))[:LETTERS]  # not the functions that other probes observe
        return f"a tensor of shape {shape}"
    if (
        isinstance(value, (list, tuple))
        and len(value) <= FEW
        and all(isinstance(each, (int, float, str)) for each in value)
    ):
        return repr(value)[:LETTERS]
    if isinstance(value, nn.Module) or not isinstance(value, (list, tuple, dict, set, DataLoader, Dataset, Sampler)):
        return ""
    try:
        return f"{len(value)} {'batches' if isinstance(value, DataLoader) else 'elements'}"
    except Exception:
        return ""  # its length is unknown
