"""The data types and image sizes of layers, normalization over the batch, and the memory kept for the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils import checkpoint

from workshop.check.evidence.events import ActivationsKept, DeviceSeen, Event, LayersSeen
from workshop.check.evidence.misuses import InputsWithoutGradients, RecomputedAtRandom
from workshop.check.probes.probe import Function, Probe, around, on
from workshop.tensors import bf16_is_fast, kept_for_backward


class Layers(Probe):
    """Looks at the output of each layer, and records a summary after each step."""

    writes = (LayersSeen, DeviceSeen)

    def clear(self) -> None:
        self.dtypes: set[str] = set()
        self.convolved: list[tuple[int, ...]] = []
        self.batchnorm = False

    @on("after_module")
    def _look(self, module: nn.Module, output: object) -> None:
        if isinstance(module, (nn.Linear, nn.Conv2d)) and isinstance(output, torch.Tensor) and output.requires_grad:
            self.dtypes.add(str(output.dtype))
            if isinstance(module, nn.Conv2d) and not self.recorder.steps:
                self.convolved.append(tuple(output.shape[-2:]))
        self.batchnorm = self.batchnorm or isinstance(module, _BatchNorm)

    @on("after_step")
    def _note(self, optimizer: Optimizer) -> None:
        self.recorder.note(LayersSeen(dtypes=sorted(self.dtypes), convolved=self.convolved, batchnorm=self.batchnorm))
        parameters = optimizer.param_groups[0]["params"]
        if parameters and self.recorder.steps == 1:
            self.recorder.note(DeviceSeen(bf16_is_fast=bf16_is_fast(parameters[0].device)))


class Activations(Probe):
    """Counts the bytes that a forward pass of the model in training keeps for the backward pass."""

    writes = (ActivationsKept,)

    @on("around_forward")
    @contextmanager
    def _around(self) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        with kept_for_backward() as kept:
            yield
        with self.recorder.guard:
            self.recorder.note(ActivationsKept(bytes=kept.bytes))


class Checkpointing(Probe):
    """Records two misuses of checkpointing, once each.

    Reentrant checkpointing of a layer whose inputs need no gradient; and random numbers that the recomputation draws anew.
    """

    writes = (InputsWithoutGradients, RecomputedAtRandom)

    def clear(self) -> None:
        self.told: set[type[Event]] = set()

    @around(checkpoint, "checkpoint")
    def _checkpoint(self, original: Function, function: Any, *args: Any, **kwargs: Any) -> Any:
        draws = kwargs.get("preserve_rng_state", True) is False and RecomputedAtRandom not in self.told
        before = torch.get_rng_state() if draws else None
        with self.recorder.guard:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            needed = any(each.requires_grad for each in tensors)
            if kwargs.get("use_reentrant") and torch.is_grad_enabled() and tensors and not needed:
                self._tell(InputsWithoutGradients())
        result = original(function, *args, **kwargs)
        with self.recorder.guard:
            if before is not None and torch.is_grad_enabled() and not torch.equal(before, torch.get_rng_state()):
                self._tell(RecomputedAtRandom())
        return result

    def _tell(self, event: Event) -> None:
        if type(event) not in self.told:
            self.told.add(type(event))
            self.note_here(event)
