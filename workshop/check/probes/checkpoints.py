"""Distributed checkpoints, safetensors files that a process reads in full, and what a model accepts of a state."""

import io
import os
import pickle
import re
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workshop.check.evidence.events import CheckpointCalled, EntriesSaved, Loaded, ModelLoaded, Saved, WeightsRead
from workshop.check.evidence.misuses import OwnStateLoaded
from workshop.check.probes.contents import content, mixed, sketches
from workshop.check.probes.probe import Function, Probe, after, around, before

LARGE = 1_000_000  # bytes of a tensor from which on its checksum is that of a summary
# In a program with one of these words, a library may use safetensors.
SAVES_TENSORS = re.compile(r"safetensors|transformers|accelerate|diffusers|peft")
NUMBERS = (bool, float, str, type(None))  # measured values, and names of hosts, may differ between the ranks


class Checkpoints(Probe):
    """Records ``save``, ``async_save`` and ``load`` of ``torch.distributed.checkpoint``, and what they save of one rank."""

    writes = (CheckpointCalled, EntriesSaved)
    package = "torch.distributed.checkpoint"  # importing it takes a second
    where = ""  # the line of the last call; a thread of async_save does not know it

    @around(lambda package: package, "save", "async_save", "load", named=True)
    def _call(self, name: str, original: Function, *args: Any, **kwargs: Any) -> Any:
        writer = kwargs.get("storage_writer")
        with self.recorder.guard:
            self.where = self.recorder.where()
        self.note_here(CheckpointCalled(name=name, writer="" if writer is None else type(writer).__name__))
        with self.recorder.quietly():
            return original(*args, **kwargs)

    @after(lambda package: package.DefaultSavePlanner, "set_up_planner")
    def _plan(self, result: None, planner: Any, *args: Any, **kwargs: Any) -> None:
        """Record the entries of this rank under the keys of the checkpoint: of a nested dictionary, "model.weight"."""
        model = self.recorder.model
        buffers = {each.data_ptr() for each in model.buffers()} if model else set[int]()
        entries = {key: _checksum(value) for key, value in planner.state_dict.items() if _is_own(value, buffers)}
        self.recorder.note(EntriesSaved(entries=entries, where=self.where))


def _is_same(one: Any, other: torch.Tensor) -> bool:
    """Whether two tensors are in the same place of the memory."""
    plain = type(one) in (torch.Tensor, nn.Parameter) and type(other) in (torch.Tensor, nn.Parameter)
    return plain and one.data_ptr() == other.data_ptr() != 0


def _is_own(value: Any, buffers: set[int]) -> bool:
    """Whether a value is saved whole, and a difference between the ranks means something."""
    if type(value) in (torch.Tensor, nn.Parameter):  # not a DTensor or a ShardedTensor
        return value.data_ptr() not in buffers and (value.dim() > 0 or not value.is_floating_point())
    if type(value) is int:
        return not (dist.is_initialized() and value == dist.get_rank())
    return not isinstance(value, (torch.Tensor, *NUMBERS))


def _checksum(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        return zlib.crc32(content(plain) if plain.nbytes < LARGE else repr(mixed(plain)).encode())
    return zlib.crc32(value.getvalue() if isinstance(value, io.BytesIO) else pickle.dumps(value))


class SafeTensors(Probe):
    """Records the files of safetensors that a program saves and opens, which Python does not see: they are opened in Rust."""

    writes = (Saved, Loaded)
    package = "safetensors.torch"

    @around(lambda package: package, "save_file")
    def _save(self, original: Function, tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorder.saved += 1
        with self.recorder.guard:
            floats = [each for each in tensors.values() if each.is_floating_point()]
            saved = Saved(
                path=os.path.realpath(filename), keys=list(tensors), moments=0, own=0, tensors=sketches(floats)
            )
            self.note_here(saved)
        with self.recorder.quietly():
            return original(tensors, filename, *args, **kwargs)

    @before(lambda package: package and sys.modules["safetensors"], "safe_open")
    @before(lambda package: package, "load_file")
    def _open(self, filename: Any, *args: Any, **kwargs: Any) -> None:
        self.note_here(Loaded(path=os.path.realpath(filename)))


class Weights(Probe):
    """Records ``load_file`` of safetensors."""

    writes = (WeightsRead,)
    package = "safetensors.torch"

    @after(lambda package: package, "load_file")
    def _load_file(self, tensors: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.note_here(WeightsRead(bytes=sum(tensor.nbytes for tensor in tensors.values())))


class ModelStates(Probe):
    """Records ``load_state_dict`` of a model."""

    writes = (ModelLoaded, OwnStateLoaded)

    @before(nn.Module, "load_state_dict")
    def _own(self, model: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        if self.recorder.steps and self.recorder.called_by_program():
            own = model.state_dict()
            pairs = [
                (value, own[name]) for name, value in state_dict.items() if isinstance(own.get(name), torch.Tensor)
            ]
            if pairs and all(map(_is_same, *zip(*pairs, strict=True))):
                self.note_here(OwnStateLoaded())

    @after(nn.Module, "load_state_dict")
    def _load(self, result: Any, model: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        if not self.recorder.quiet:
            unknown = len(result.unexpected_keys) if result else 0
            self.note_here(ModelLoaded(given=len(state_dict), matched=len(state_dict) - unknown))
