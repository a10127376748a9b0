"""Layers that several ranks have together, as DTensors, such as those of ``parallelize_module``."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workshop.check.evidence.events import ModelDivided
from workshop.check.probes.probe import Probe, on


class Divided(Probe):
    """Records, before the first step, which ranks divide the layers of the model, if FSDP does not divide them."""

    writes = (ModelDivided,)

    @on("before_step")
    def _look(self, optimizer: Optimizer) -> None:
        if self.recorder.steps:
            return
        ranks: set[int] = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                ranks |= _together(parameter, self.recorder.model)
        if len(ranks) > 1:
            self.note_here(ModelDivided(ranks=sorted(ranks)))


def _together(parameter: torch.Tensor, model: nn.Module | None) -> set[int]:
    """The ranks that divide a DTensor, without those of FSDP, which divides it along the first dimension of the mesh."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return set()
    of_fsdp = any(hasattr(each, "unshard") for each in (model.modules() if model else ()))
    first = 1 if of_fsdp else 0
    if mesh.ndim == 2 and not of_fsdp and not parameter.placements[0].is_shard():
        first = 1  # replicated over the ranks of data parallelism
    if mesh.ndim - first != 1 or not parameter.placements[-1].is_shard():
        return set()
    table = mesh.mesh.tolist()
    coordinate = mesh.get_coordinate()
    return set(table[coordinate[0]] if mesh.ndim == 2 else table)
