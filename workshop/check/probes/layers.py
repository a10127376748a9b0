"""What the layers compute with: types, sizes of images, normalization over the batch; and what the device is fast at."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from workshop.check.evidence.events import DeviceSeen, LayersSeen
from workshop.check.probes.probe import Probe
from workshop.tensors import bf16_is_fast


class Layers(Probe):
    """Looks at what each layer returns."""

    writes = (LayersSeen, DeviceSeen)

    def clear(self) -> None:
        """Forget the layers that were seen."""
        self.dtypes: set[str] = set()
        self.convolved: list[tuple[int, ...]] = []
        self.batchnorm = self.device_seen = False

    def install(self) -> None:
        """Look at each call of a module, and note what was seen after each step."""
        self.recorder.after_module.append(self._look)
        self.recorder.after_step.append(self._note)

    def _look(self, module: nn.Module, output: object) -> None:
        if isinstance(module, (nn.Linear, nn.Conv2d)) and isinstance(output, torch.Tensor) and output.requires_grad:
            self.dtypes.add(str(output.dtype))
            if isinstance(module, nn.Conv2d) and not self.recorder.steps:
                self.convolved.append(tuple(output.shape[-2:]))
        self.batchnorm = self.batchnorm or isinstance(module, _BatchNorm)

    def _note(self, optimizer: Optimizer) -> None:
        self.recorder.note(
            LayersSeen(dtypes=sorted(self.dtypes), convolved=list(self.convolved), batchnorm=self.batchnorm)
        )
        parameters = optimizer.param_groups[0]["params"]
        if parameters and not self.device_seen:
            self.device_seen = True
            self.recorder.note(DeviceSeen(bf16_is_fast=bf16_is_fast(parameters[0].device)))
