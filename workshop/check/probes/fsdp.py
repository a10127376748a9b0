"""FSDP: which modules are sharded, and how the model is sharded when training begins."""

import importlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workshop.check.evidence.events import FullySharded, LayoutSeen
from workshop.check.evidence.misuses import ShardedAsOne, ShardsLeft
from workshop.check.probes.contents import is_sharded, sketches
from workshop.check.probes.probe import Probe, before, on
from workshop.tensors import own_part

LAYERS = 3  # equal layers that could be gathered one after the other
FIRST = 60  # backward passes after which the gradients of shards are recorded


class Sharding(Probe):
    """Records ``fully_shard`` and, before the first step, the layout of the model, because then no layer is gathered."""

    writes = (FullySharded, LayoutSeen)
    package = "torch.distributed.fsdp"  # importing it takes a second

    @before(lambda package: package, "fully_shard")
    def _fully_shard(self, module: Any, *args: Any, offload_policy: Any = None, **kwargs: Any) -> None:
        modules = module if isinstance(module, (list, tuple)) else [module]
        parameters = [parameter for each in modules for parameter in each.parameters()]
        whole = [each for each in parameters if not hasattr(each, "to_local") and not each.is_meta]
        self.note_here(FullySharded(held=sum(each.nbytes for each in whole), offload=type(offload_policy).__name__))

    @on("before_step")
    def _layout(self, optimizer: Optimizer) -> None:
        model = self.recorder.model
        if self.recorder.steps or model is None:
            return
        group: type[Any] = importlib.import_module(self.package).FSDPModule  # the class that fully_shard gives a module
        named = dict(model.named_parameters())
        lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        layers = max(lists, key=len, default=[])
        layout = LayoutSeen(
            own=sum(own_part(parameter).nbytes for parameter in named.values()),
            whole=sum(parameter.numel() * parameter.element_size() for parameter in named.values()),
            whole_here=[name for name, each in named.items() if own_part(each).numel() == each.numel()],
            dtypes=sorted({str(parameter.dtype) for parameter in named.values()}),
            groups=sum(isinstance(each, group) for each in model.modules()),
            layers=len(layers),
            layer_groups=sum(isinstance(layer, group) for layer in layers),
            buffers=[name for name, buffer in model.named_buffers() if not _is_right(name, buffer, model)],
        )
        self.note_here(layout)


class Shards(Probe):
    """Records the gradients that a backward pass leaves in the shards of a model, to see how they are scaled before the step."""

    writes = (ShardsLeft, ShardedAsOne)

    def clear(self) -> None:
        self.looks = self.looked_at = 0  # the sharded model may come after a first training of one rank

    @on("before_step")
    def _groups(self, optimizer: Optimizer) -> None:
        """Record a model with a list of equal layers, of which FSDP gathers all parameters together."""
        model = self.recorder.model
        if model is None or self.looked_at >= FIRST:
            return
        self.looked_at += 1
        modules = list(model.modules())
        groups = sum(map(_gathers, modules))
        if not groups:
            return
        self.looked_at = FIRST
        lists = [list(each) for each in modules if isinstance(each, nn.ModuleList | nn.Sequential)]
        layers = max((each for each in lists if len(set(map(type, each))) == 1), key=len, default=[])
        if groups == 1 and len(layers) >= LAYERS and next(layers[0].parameters(), None) is not None:
            self.note_here(ShardedAsOne(layers=len(layers), kind=type(layers[0]).__name__))

    @on("after_backward")
    def _look(self) -> None:
        model = self.recorder.model
        if model is None or self.looks >= FIRST or not any(map(is_sharded, model.parameters())):
            return
        self.looks += 1
        named = [(name, each.grad) for name, each in model.named_parameters() if each.grad is not None]
        found = zip(named, sketches(grad for _, grad in named), strict=True)
        self.recorder.note(ShardsLeft(norms={name: sketch[0] for (name, _), sketch in found if sketch}))


def _gathers(module: nn.Module) -> bool:
    """Whether FSDP gathers the parameters of a module for its forward pass, and frees them after it."""
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
    return "FULL_SHARD" in strategy or any(each.__name__ == "FSDPModule" for each in type(module).__mro__)


def _is_right(name: str, buffer: torch.Tensor, model: Any) -> bool:
    """Whether a buffer of the rotary embedding contains theta ** -(2 i / d), beginning with 1."""
    if not name.endswith("inv_freq"):
        return True
    theta = model.config.rope_parameters["rope_theta"]
    exponents = torch.arange(len(buffer), dtype=torch.float32) / len(buffer)
    return bool(torch.allclose(buffer.detach().float().cpu(), theta**-exponents, rtol=1e-2))
