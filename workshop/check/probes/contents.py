"""Short descriptions of tensor contents: sketches, keys of rows, and the first tensor in nested arguments."""

import ctypes
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from workshop.check.evidence.events import Key, Sketch
from workshop.tensors import own_part

SAMPLES = 12  # number of values of a tensor in its sketch, in addition to the norm
UNREADABLE = (RuntimeError, TypeError)  # raised by tensors without readable values, as on the device "meta"
MANY = 4  # times as many rows as chosen ones
TOKENS = (torch.int8, torch.int16, torch.int32, torch.int64)


def attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object, {} if it has none. A class of the program may answer with any error."""
    with suppress(Exception):
        return vars(value)
    return {}


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


def is_synchronized(layer: nn.Module) -> bool:
    """Whether a layer is a SyncBatchNorm, or stands for one on the CPU, which cannot synchronize (see ``cuda_on_cpu.py``)."""
    return isinstance(layer, nn.SyncBatchNorm) or getattr(layer, "synchronized", False)


def is_fsdp1(model: nn.Module | None) -> bool:
    """Whether a model is wrapped in FullyShardedDataParallel, also if its parameters keep their names."""
    return any(type(each).__name__ == "FullyShardedDataParallel" for each in (model.modules() if model else ()))


def content(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, for as long as it exists. (torch does not require NumPy.)"""
    size, address = tensor.element_size(), tensor.untyped_storage().data_ptr()
    if not address and tensor.numel():
        raise TypeError("the tensor has no contents")
    place = address + tensor.storage_offset() * size
    return memoryview((ctypes.c_ubyte * (tensor.numel() * size)).from_address(place))


def mixed(tensor: torch.Tensor) -> Sketch:
    """Return the norm of a tensor, and sums with different weights: they change if any of its values changes."""
    with suppress(*UNREADABLE):
        values = tensor.detach().cpu().flatten().double()
        places = torch.arange(len(values), dtype=torch.double)
        return float(values.norm()), [float((values * torch.cos(turn * places)).sum()) for turn in (1, 2, 3)]
    return None


def rows(tensor: torch.Tensor) -> list[Key]:
    """Return a key for each row of a tensor, equal for equal contents; empty for a tensor without contents."""
    with suppress(*UNREADABLE):
        flat = tensor.detach().cpu().contiguous()
        table = flat.reshape(len(flat), -1)
        data, width = content(table), table.shape[1] * table.element_size() or 1  # a row may be empty
        found = [data[start : start + width] for start in range(0, len(data), width)]
        if table.dtype in TOKENS:  # a sample has a different number of zeros behind it in each batch
            size = table.element_size()
            found = [row[: -(-len(bytes(row).rstrip(b"\0")) // size) * size] for row in found]
        return [("content", zlib.crc32(row), len(row)) for row in found]
    return []


def chosen_rows(tensor: torch.Tensor, others: Sequence[object]) -> torch.Tensor:
    """Return the rows that a tensor of numbers chooses, such as some nodes of a graph, each with its number; else all rows."""
    for each in others:
        if (
            isinstance(each, torch.Tensor)
            and each.dim() == 1
            and each.dtype in TOKENS
            and MANY * len(each) <= len(tensor)
        ):
            with suppress(*UNREADABLE, IndexError):
                number = each.detach().cpu().long()
                if len(number.unique()) == len(number) and len(number):  # labels are repeated
                    return torch.cat([tensor.detach().cpu().flatten(1)[number].double(), number[:, None].double()], 1)
    return tensor


def floats(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors with rows of floating-point numbers in nested arguments."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 and value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from floats(each)


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
