"""Compilation, which the check only notes: compiling takes half a minute."""

from typing import Any

import torch
from torch import nn

from workshop.check.evidence.events import Compiled
from workshop.check.probes.probe import Probe


class Compiling(Probe):
    """Notes ``torch.compile`` and ``Module.compile``, and compiles nothing."""

    writes = (Compiled,)
    always = True

    def install(self) -> None:
        """Replace them."""
        self.patches.set(nn.Module, "compile", lambda module, *args, **kwargs: self.recorder.note(Compiled()))
        self.patches.set(torch, "compile", self._compile)

    def _compile(self, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.recorder.note(Compiled())
        return (lambda function: function) if model is None else model  # without a model it is a decorator
