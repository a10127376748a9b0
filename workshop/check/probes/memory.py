"""What a training step keeps in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workshop.check.evidence.events import ActivationsKept
from workshop.check.probes.probe import Probe
from workshop.tensors import kept_for_backward


class Activations(Probe):
    """Counts what a forward pass in training keeps for the backward pass."""

    writes = (ActivationsKept,)

    def install(self) -> None:
        """Look at each forward pass of a whole model."""
        self.recorder.around_forward.append(self._around)

    @contextmanager
    def _around(self) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        with kept_for_backward() as kept:
            yield
        with self.recorder.guard:
            self.recorder.note(ActivationsKept(bytes=kept.bytes))
