"""Accelerate: calls of methods of the Accelerator."""

from typing import Any

from workshop.check.evidence.events import AcceleratorCalled
from workshop.check.probes.probe import Probe, before

METHODS = ("prepare", "backward", "gather_for_metrics", "save_state", "load_state")


class Accelerators(Probe):
    """Records calls of ``Accelerator`` methods."""

    writes = (AcceleratorCalled,)
    library = "accelerate"

    @before(lambda accelerate: accelerate.Accelerator, *METHODS, named=True)
    def _call(self, name: str, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        of = [type(getattr(arg, "sampler", arg)).__name__ for arg in args]  # for a loader: the type of its sampler
        self.note_here(AcceleratorCalled(name=name, of=of))
