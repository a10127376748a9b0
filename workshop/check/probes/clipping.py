"""Gradient clipping: the norms that it is computed from."""

from typing import Any

import torch
from torch import nn

from workshop.check.evidence.events import GradientsClipped
from workshop.check.probes.contents import sketches
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe


class Clipping(Probe):
    """Notes ``clip_grad_norm_``, with the norms of this process's part of the gradients."""

    writes = (GradientsClipped,)

    def install(self) -> None:
        """Replace it."""
        for module in (nn.utils, nn.utils.clip_grad):
            self.patches.wrap(module, "clip_grad_norm_", self._clip)

    def _clip(self, original: Function) -> Function:
        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            # (A generator can be used up only once.)
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            with self.recorder.guard:
                norms = [sketch[0] for sketch in sketches(each.grad for each in parameters) if sketch]
                self.recorder.note(GradientsClipped(norms=norms, where=self.recorder.where()))
            return original(parameters, *args, **kwargs)

        return clip_grad_norm_
