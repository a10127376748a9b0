"""Layers that several ranks have together, as DTensors, such as those of ``parallelize_module``."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workshop.check.evidence.events import InputSharded, ModelDivided
from workshop.check.probes.contents import first_tensor, is_sharded
from workshop.check.probes.probe import Probe, before, on
from workshop.tensors import dtensor


class Divided(Probe):
    """Records, before the first step, which ranks divide the layers of the model, if FSDP does not divide them."""

    writes = (ModelDivided, InputSharded)
    package = "torch"

    def clear(self) -> None:
        self.input: torch.Tensor | None = None  # of the last forward pass
        self.told = False

    @on("before_forward")
    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.input = None if self.told else first_tensor([*args, *kwargs.values()])
        if self.input is not None and is_sharded(self.input):
            self._tell()

    @before(lambda torch: dtensor(), "from_local")
    def _from_local(self, part: torch.Tensor, mesh: Any = None, placements: Any = (), **options: Any) -> None:
        if part is self.input and any(each.is_shard() for each in placements or ()):
            self._tell()

    def _tell(self) -> None:
        self.told, self.input = True, None
        self.note_here(InputSharded())

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
    if mesh.ndim == 2 and not parameter.placements[0].is_shard():
        if of_fsdp:
            return set()  # hybrid sharding: FSDP divides it along the second dimension
        first = 1  # replicated over the ranks of data parallelism
    if mesh.ndim - first != 1 or not parameter.placements[-1].is_shard():
        return set()
    table = mesh.mesh.tolist()
    coordinate = mesh.get_coordinate()
    return set(table[coordinate[0]] if mesh.ndim == 2 else table)
