"""Distributed checkpoints, safetensors files that a process reads in full, and what a model accepts of a state."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from workshop.check.evidence.events import CheckpointCalled, ModelLoaded, WeightsRead
from workshop.check.probes.probe import Function, Probe, after, around


class Checkpoints(Probe):
    """Records ``save``, ``async_save`` and ``load`` of ``torch.distributed.checkpoint``."""

    writes = (CheckpointCalled,)
    package = "torch.distributed.checkpoint"  # importing it takes a second

    @around(lambda package: package, "save", "async_save", "load", named=True)
    def _call(self, name: str, original: Function, *args: Any, **kwargs: Any) -> Any:
        writer = kwargs.get("storage_writer")
        self.note_here(CheckpointCalled(name=name, writer="" if writer is None else type(writer).__name__))
        with self.recorder.quietly():
            return original(*args, **kwargs)


class Weights(Probe):
    """Records ``load_file`` of safetensors."""

    writes = (WeightsRead,)
    package = "safetensors.torch"

    @after(lambda package: package, "load_file")
    def _load_file(self, tensors: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.note_here(WeightsRead(bytes=sum(tensor.nbytes for tensor in tensors.values())))


class ModelStates(Probe):
    """Records ``load_state_dict`` of a model."""

    writes = (ModelLoaded,)

    @after(nn.Module, "load_state_dict")
    def _load(self, result: Any, model: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        if not self.recorder.quiet:
            unknown = len(result.unexpected_keys) if result else 0
            self.note_here(ModelLoaded(given=len(state_dict), matched=len(state_dict) - unknown))
