"""Accelerate: the calls of the Accelerator's methods."""

import importlib
import importlib.util
from functools import partial
from typing import Any

from workshop.check.evidence.events import AcceleratorCalled
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe

METHODS = ("prepare", "backward", "gather_for_metrics", "save_state", "load_state")


class Accelerators(Probe):
    """Notes methods of the ``Accelerator``."""

    writes = (AcceleratorCalled,)
    library = "accelerate"

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        """Import it."""
        if importlib.util.find_spec("accelerate"):
            importlib.import_module("accelerate")

    def install(self) -> None:
        """Replace them."""
        if importlib.util.find_spec("accelerate"):
            accelerate: Any = importlib.import_module("accelerate")
            for name in METHODS:
                self.patches.wrap(accelerate.Accelerator, name, partial(self._call, name=name))

    def _call(self, original: Function, name: str) -> Function:
        def call(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.guard:
                of = [type(getattr(arg, "sampler", arg)).__name__ for arg in args]  # of a loader: how it distributes
                self.recorder.note(AcceleratorCalled(name=name, of=of, where=self.recorder.where()))
            return original(accelerator, *args, **kwargs)

        return call
