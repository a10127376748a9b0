"""Where a program stops early: the comparisons in its files that decide about it."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from workshop.check.evidence.misuses import StopsAtLimit, StopsEarly
from workshop.check.probes.probe import Probe, on
from workshop.check.stopping import early_stops, stops_at_limits

FILES = 200  # of the program that are read


class Stopping(Probe):
    """Reads the files of the program after its first step."""

    writes = (StopsEarly, StopsAtLimit)

    def clear(self) -> None:
        self.read = False

    @on("after_step")
    def _look(self, optimizer: Optimizer) -> None:
        if self.read:
            return
        self.read = True
        modules: list[Any] = list(sys.modules.values())
        files = {getattr(module, "__file__", None) or "" for module in modules} | {self.recorder.script}
        own = {self.recorder.own(file): file for file in files if file.endswith(".py") and self.recorder.own(file)}
        texts = {}
        for name, file in list(own.items())[:FILES]:
            with suppress(OSError, UnicodeDecodeError):
                texts[name] = Path(file).read_text()
        running: dict[str, list[int]] = {}
        for frame in self.recorder.frames():
            running.setdefault(self.recorder.own(frame.f_code.co_filename), []).append(frame.f_lineno)
        with suppress(SyntaxError, ValueError, RecursionError):
            for stop in early_stops(texts):
                self.recorder.note(StopsEarly(where=f"{stop.file}:{stop.line}", names=list(stop.compared)))
            for stop in stops_at_limits(texts, running):
                self.recorder.note(StopsAtLimit(where=f"{stop.file}:{stop.line}", names=list(stop.compared)))
