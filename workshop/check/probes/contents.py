"""Short descriptions of tensor contents: sketches, keys of rows, and the first tensor in nested arguments."""

import zlib
from collections.abc import Iterable
from contextlib import suppress

import numpy
import torch
from torch import nn

from workshop.check.evidence.events import Key, Sketch
from workshop.tensors import own_part

SAMPLES = 12  # number of values of a tensor in its sketch, in addition to the norm
# Raised by tensors without readable values: on the device "meta", or of a type that NumPy does not know.
UNREADABLE = (RuntimeError, TypeError)


def sketches(tensors: Iterable[torch.Tensor | None]) -> list[Sketch]:
    """Return a sketch of each tensor, to compare processes; None for None and for tensors without contents."""
    return [None if tensor is None else _sketch(tensor) for tensor in tensors]


def _sketch(tensor: torch.Tensor) -> Sketch:
    with suppress(*UNREADABLE):
        tensor = own_part(tensor).detach()
        flat = (tensor.to_dense() if tensor.is_sparse else tensor).reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        values = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].cpu().double().tolist()
        return torch.linalg.vector_norm(flat.float()).item(), values
    return None


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this process has only a part of a tensor (a DTensor with a shard, or a parameter that FSDP flattens)."""
    placements = getattr(tensor, "placements", ())
    return any(each.is_shard() for each in placements) or type(tensor).__name__ == "FlatParameter"


def is_fsdp1(model: nn.Module | None) -> bool:
    """Whether a model is wrapped in FullyShardedDataParallel, also if its parameters keep their names."""
    return any(type(each).__name__ == "FullyShardedDataParallel" for each in (model.modules() if model else ()))


def rows(tensor: torch.Tensor) -> list[Key]:
    """Return a key for each row of a tensor, equal for equal contents; empty for a tensor without contents."""
    with suppress(*UNREADABLE):
        flat = tensor.detach().cpu().contiguous()
        array = (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat).reshape(len(flat), -1).numpy()
        if array.dtype.kind == "i":  # tokens: a sample has a different number of zeros behind it in each batch
            array = [numpy.trim_zeros(row, "b") for row in array]
        return [("content", zlib.crc32(row.tobytes()), row.nbytes) for row in array]
    return []


def mean(tensor: torch.Tensor | None) -> float | None:
    """Return the mean of a tensor; None without a tensor or without contents."""
    with suppress(*UNREADABLE):
        return None if tensor is None else float(tensor.detach().float().mean())
    return None


def is_zero(tensor: torch.Tensor | None) -> bool:
    """Whether there is no tensor, it has no contents, or the part of this process contains only zeros."""
    with suppress(*UNREADABLE):
        return tensor is None or not bool(own_part(tensor).any())
    return True


def first_tensor(value: object) -> torch.Tensor | None:
    """Return the first tensor with rows in nested arguments, or None."""
    if isinstance(value, torch.Tensor):
        return value if value.dim() > 0 and len(value) > 0 else None
    if isinstance(value, dict):
        value = list(value.values())
    found = map(first_tensor, value if isinstance(value, (list, tuple)) else ())
    return next((tensor for tensor in found if tensor is not None), None)
