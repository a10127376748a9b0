"""What rank 0 prints or logs."""

import builtins
import logging
import sys
from typing import Any

import torch.distributed as dist

from workshop.check.evidence.events import Printed
from workshop.check.probes.probe import Probe, before

MOST, LONGEST = 400, 1000  # texts per process, and characters of a text


class Prints(Probe):
    """Records the texts with numbers that ``print`` and ``logging`` write."""

    writes = (Printed,)

    def clear(self) -> None:
        self.left = MOST

    @before(builtins, "print")
    def _printed(self, *values: Any, sep: str | None = None, file: Any = None, **options: Any) -> None:
        if file in (None, sys.stdout, sys.stderr):
            self._note((" " if sep is None else sep).join(map(str, values)))

    @before(logging.Logger, "callHandlers")
    def _logged(self, logger: logging.Logger, record: logging.LogRecord) -> None:
        if not record.name.startswith("torch"):
            self._note(record.getMessage())

    def _note(self, text: str) -> None:
        first = not dist.is_initialized() or dist.get_rank() == 0
        if first and self.left and len(text) <= LONGEST and any(letter.isdigit() for letter in text):
            self.left -= 1
            self.note_here(Printed(text=text, given=self.recorder.parameters_given))
