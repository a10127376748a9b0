"""Models that get their memory from ``to_empty()``: whether all their parameters are initialized before training."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workshop.check.evidence.misuses import NeverFilled
from workshop.check.probes.probe import Probe, after, on
from workshop.tensors import own_part


class Emptied(Probe):
    """Fills what ``to_empty()`` allocates with NaN, and looks before the first step after it for what still is NaN."""

    writes = (NeverFilled,)

    def clear(self) -> None:
        self.line = ""  # of the last call of to_empty(), until the next step

    @after(nn.Module, "to_empty")
    def _fill(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            for tensor in map(own_part, model.parameters()):
                if tensor.is_floating_point() and not tensor.is_meta:
                    tensor.data.fill_(math.nan)
        self.line = self.recorder.where()

    @on("before_step")
    def _look(self, optimizer: Optimizer) -> None:
        model = self.recorder.model
        if self.line and model:
            trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
            own = {name: own_part(each) for name, each in model.named_parameters() if id(each) in trained}
            names = [name for name, part in own.items() if part.numel() and bool(part.detach().isnan().all())]
            if names:
                self.recorder.note(NeverFilled(names=names, of=len(own), where=self.line))
            self.line = ""
