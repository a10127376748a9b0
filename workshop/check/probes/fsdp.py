"""FSDP: which modules are sharded, and how the model is sharded when training begins."""

import importlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workshop.check.evidence.events import FullySharded, LayoutSeen
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe
from workshop.tensors import own_part

PACKAGE = "torch.distributed.fsdp"  # importing it takes a second, which only some programs need


class Sharding(Probe):
    """Notes ``fully_shard``, and before the first step the layout of the model: no layer is gathered then."""

    writes = (FullySharded, LayoutSeen)

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        """Import FSDP."""
        importlib.import_module(PACKAGE)

    def install(self) -> None:
        """Replace ``fully_shard``."""
        package: Any = importlib.import_module(PACKAGE)
        self.group: type[Any] = package.FSDPModule  # the class of a module that fully_shard has made a group of
        self.patches.wrap(package, "fully_shard", self._fully_shard)
        self.recorder.before_step.append(self._layout)

    def _fully_shard(self, original: Function) -> Function:
        recorder = self.recorder

        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            with recorder.guard:
                modules = module if isinstance(module, (list, tuple)) else [module]
                held = sum(
                    parameter.nbytes
                    for each in modules
                    for parameter in each.parameters()
                    if not hasattr(parameter, "to_local") and not parameter.is_meta
                )
                offload = type(kwargs.get("offload_policy")).__name__
                recorder.note(FullySharded(held=held, offload=offload, where=recorder.where()))
            return original(module, *args, **kwargs)

        return fully_shard

    def _layout(self, optimizer: Optimizer) -> None:
        model = self.recorder.model
        if self.recorder.steps or model is None:
            return
        named = dict(model.named_parameters())
        layers = decoder_layers(model)
        self.recorder.note(
            LayoutSeen(
                own=sum(own_part(parameter).nbytes for parameter in named.values()),
                whole=sum(parameter.numel() * parameter.element_size() for parameter in named.values()),
                whole_here=[name for name, each in named.items() if own_part(each).numel() == each.numel()],
                dtypes=sorted({str(parameter.dtype) for parameter in named.values()}),
                groups=sum(isinstance(each, self.group) for each in model.modules()),
                layers=len(layers),
                layer_groups=sum(isinstance(layer, self.group) for layer in layers),
                buffers=[name for name, buffer in model.named_buffers() if not _is_right(name, buffer, model)],
                where=self.recorder.where(),
            )
        )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: the modules in its longest list."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _is_right(name: str, buffer: torch.Tensor, model: Any) -> bool:
    """Whether a buffer of the rotary embedding holds theta ** -(2 i / d), from 1 downwards."""
    if not name.endswith("inv_freq"):
        return True
    theta = model.config.rope_parameters["rope_theta"]
    exponents = torch.arange(len(buffer), dtype=torch.float32) / len(buffer)
    return bool(torch.allclose(buffer.detach().float().cpu(), theta**-exponents, rtol=1e-2))
