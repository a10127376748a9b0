"""Files of weights that a process reads in full."""

import importlib
import importlib.util
from typing import Any

from workshop.check.evidence.events import WeightsRead
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe


class Weights(Probe):
    """Notes safetensors' ``load_file``."""

    writes = (WeightsRead,)

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        """Import it."""
        if importlib.util.find_spec("safetensors"):
            importlib.import_module("safetensors.torch")

    def install(self) -> None:
        """Replace it."""
        if importlib.util.find_spec("safetensors"):
            self.patches.wrap(importlib.import_module("safetensors.torch"), "load_file", self._load_file)

    def _load_file(self, original: Function) -> Function:
        def load_file(*args: Any, **kwargs: Any) -> Any:
            tensors = original(*args, **kwargs)
            with self.recorder.guard:
                size = sum(tensor.nbytes for tensor in tensors.values())
                self.recorder.note(WeightsRead(bytes=size, where=self.recorder.where()))
            return tensors

        return load_file
