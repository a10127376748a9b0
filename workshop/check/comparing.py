"""Give one process the global batches of several ranks, so that any program can be compared with itself on one process.

``keep`` stores the first batches of each loader on each rank, below the Python code of the ``DataLoader``. ``replace`` returns
the batches of all ranks, joined, where one process would get its own. Both tame the random numbers of the steps.
"""

import copy
import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.data import dataloader

from workshop.check.probes.recorder import Recorder
from workshop.check.taming import tame

LOADERS = 8  # iterations of loaders of which batches are kept
BATCHES = 8  # of each of them
LARGEST = 32_000_000  # bytes of a batch
Place = tuple[int, int]  # the number of an iteration over a loader, and of the batch in it


def keep(file: Path) -> Callable[[Recorder], None]:
    """Return a function for ``Program.before`` that appends the batches of each rank to a file."""

    def before(recorder: Recorder) -> None:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # now: the probes forbid it later

        def kept(place: Place, data: Any) -> Any:
            with suppress(Exception):  # a batch may be anything
                rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
                content = io.BytesIO()
                _Pickler(content).dump((place, rank, data))
                if content.tell() <= LARGEST:
                    os.write(opened, content.getvalue())
            return data

        _each_batch(kept)

    return before


def replace(file: Path, ranks: int) -> Callable[[Recorder], None]:
    """Return a function for ``Program.before`` that replaces batches by the joined ones of this number of ranks."""

    def before(recorder: Recorder) -> None:
        parts: dict[Place, dict[int, Any]] = {}
        with open(file, "rb") as stored, suppress(EOFError, pickle.UnpicklingError):
            while True:
                place, rank, data = pickle.load(stored)
                parts.setdefault(place, {})[rank] = data

        def replaced(place: Place, data: Any) -> Any:
            with suppress(Exception):  # without the joined batch the samples differ, and the rules do not compare
                return joined([parts[place][rank] for rank in range(ranks)])
            return data

        _each_batch(replaced)

    return before


class _Pickler(pickle.Pickler):
    """Stores the values of tensors. (Their own way calls ``torch.save``, which the probes record.)"""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
        return _tensor, (bytes(content.numpy()), value.dtype, tuple(value.shape))


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
    )


def _each_batch(change: Callable[[Place, Any], Any]) -> None:
    """Pass each of the first batches through a function, together with its place."""
    numbers: WeakKeyDictionary[Any, tuple[int, count[int]]] = WeakKeyDictionary()
    original = dataloader._BaseDataLoaderIter.__next__

    def __next__(self: Any) -> Any:
        data = original(self)
        if not seen:
            tame()  # not earlier, because the parameters need random values
        if self not in numbers:
            numbers[self] = len(seen), count()
            seen.append(None)
        iteration, batch = numbers[self][0], next(numbers[self][1])
        return change((iteration, batch), data) if iteration < LOADERS and batch < BATCHES else data

    seen: list[None] = []
    dataloader._BaseDataLoaderIter.__next__ = __next__


def joined(parts: Sequence[Any]) -> Any:
    """Join the batches of several ranks: tensors along their first dimension, and the same fields with each other.

    Raises:
        ValueError: they cannot be joined.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)) if first.dim() else first
    if isinstance(first, Mapping):
        whole: Any = copy.copy(first)
        for key in first:
            whole[key] = joined([part[key] for part in parts])
        return whole
    if isinstance(first, (list, tuple)):
        if any(len(part) != len(first) for part in parts):
            raise ValueError("lists of different lengths")
        if all(isinstance(each, (str, int, float)) for each in first):
            values = [each for part in parts for each in part]
            return type(first)(values)
        fields = [joined(together) for together in zip(*parts, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    if isinstance(first, (str, int, float, type(None))):
        return first
    raise ValueError(f"a batch contains {type(first).__name__}")
