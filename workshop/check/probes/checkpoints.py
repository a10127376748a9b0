"""Checkpoints that many ranks write together."""

import importlib
from functools import partial
from typing import Any

from workshop.check.evidence.events import CheckpointCalled
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe

PACKAGE = "torch.distributed.checkpoint"  # importing it takes a second, which only some programs need


class Checkpoints(Probe):
    """Notes ``save``, ``async_save`` and ``load`` of ``torch.distributed.checkpoint``."""

    writes = (CheckpointCalled,)

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        """Import the package."""
        importlib.import_module(PACKAGE)

    def install(self) -> None:
        """Replace its functions."""
        package = importlib.import_module(PACKAGE)
        for name in ("save", "async_save", "load"):
            self.patches.wrap(package, name, partial(self._call, name=name))

    def _call(self, original: Function, name: str) -> Function:
        recorder = self.recorder

        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            with recorder.guard:
                writer = kwargs.get("storage_writer")
                kind = "" if writer is None else type(writer).__name__
                recorder.note(CheckpointCalled(name=name, writer=kind, where=recorder.where()))
            recorder.quiet += 1
            try:
                return original(*args, **kwargs)
            finally:
                recorder.quiet -= 1

        return checkpoint
