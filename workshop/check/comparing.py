"""Give one process the global batches of several ranks, so that any program can be compared with itself on one process.

``keep`` stores the first batches of each loader on each rank, below the Python code of the ``DataLoader``. In a later run,
``replace`` gives each rank these batches again, or one process the joined ones, and tames the random numbers of the steps.
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

from workshop.check.probes.contents import content
from workshop.check.probes.recorder import Recorder
from workshop.check.taming import tame

LOADERS = 8  # iterations of loaders of which batches are kept
BATCHES = 8  # of each of them
LARGEST = 32_000_000  # bytes of a batch
UNSTORED = (
    pickle.PicklingError,
    TypeError,
    AttributeError,
    RecursionError,
)  # what the pickle of an unusual batch raises
UNJOINED = (KeyError, ValueError, TypeError, RuntimeError)  # a rank has no such batch, or the sizes do not fit
Place = tuple[int, int]  # the number of an iteration over a loader, and of the batch in it


def keep(file: Path) -> Callable[[Recorder], None]:
    """Return a function for ``Program.before`` that appends the batches of each rank to a file."""

    def before(recorder: Recorder) -> None:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # now: the probes forbid it later

        def kept(place: Place, data: Any) -> Any:
            with suppress(*UNSTORED):  # a batch may be anything
                rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
                stored = io.BytesIO()
                _Pickler(stored).dump((place, rank, data))
                if stored.tell() <= LARGEST:
                    os.write(opened, stored.getvalue())
            return data

        _each_batch(kept)

    return before


def replace(file: Path, ranks: int) -> Callable[[Recorder], None]:
    """Return a function for ``Program.before`` that gives a rank its stored batches, or one process those of all ranks."""

    def before(recorder: Recorder) -> None:
        parts: dict[Place, dict[int, Any]] = {}
        with open(file, "rb") as stored, suppress(EOFError, pickle.UnpicklingError):
            while True:
                place, rank, data = pickle.load(stored)
                parts.setdefault(place, {})[rank] = data

        size = 0

        def replaced(place: Place, data: Any) -> Any:
            nonlocal size
            if place == (0, 0):
                tame(lambda: size)  # not earlier, because the parameters need random values
            with suppress(*UNJOINED):  # without the joined batch the samples differ, and the rules do not compare
                own = dist.get_rank() if dist.is_initialized() and dist.get_world_size() > 1 else None
                data = joined([parts[place][rank] for rank in range(ranks)], own)
            size = batch_size(data)
            return data

        _each_batch(replaced)

    return before


class _Pickler(pickle.Pickler):
    """Stores the values of tensors. (Pickling a tensor otherwise calls ``torch.save``, which the probes record.)"""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        whole = value.detach().cpu().contiguous()
        return _tensor, (bytes(content(whole)), value.dtype, tuple(value.shape))


def _tensor(stored: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(stored), dtype=dtype).reshape(shape) if stored else torch.empty(shape, dtype=dtype)
    )


def _each_batch(change: Callable[[Place, Any], Any]) -> None:
    """Pass each of the first batches through a function, together with its place."""
    numbers: WeakKeyDictionary[Any, tuple[int, count[int]]] = WeakKeyDictionary()
    original = dataloader._BaseDataLoaderIter.__next__

    def __next__(self: Any) -> Any:
        data = original(self)
        if self not in numbers:
            numbers[self] = len(seen), count()
            seen.append(None)
        iteration, batch = numbers[self][0], next(numbers[self][1])
        return change((iteration, batch), data) if iteration < LOADERS and batch < BATCHES else data

    seen: list[None] = []
    dataloader._BaseDataLoaderIter.__next__ = __next__


def joined(parts: Sequence[Any], rank: int | None = None) -> Any:
    """Join the batches of several ranks: tensors along their first dimension, and the same fields with each other.

    Args:
        parts: the batches, in the order of the ranks.
        rank: return only the part of this rank, padded to the size of the joined batch.

    Raises:
        ValueError: they cannot be joined.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if not first.dim():
            return parts[rank or 0]
        parts = _padded(parts)
        return torch.cat(list(parts)) if rank is None else parts[rank]
    if isinstance(first, Mapping):
        whole: Any = copy.copy(first)
        for key in first:
            whole[key] = joined([part[key] for part in parts], rank)
        return whole
    if isinstance(first, (list, tuple)):
        if all(isinstance(each, Mapping) for part in parts for each in part):
            return _samples(parts, rank)
        if any(
            isinstance(each, (list, tuple)) and _of_mappings(each) for each in first
        ):  # one list of the inputs, and one of their targets, as for object detection
            return type(first)(
                _samples(each, rank) if isinstance(each[0], (list, tuple)) else joined(each, rank)
                for each in zip(*parts, strict=True)
            )
        if all(isinstance(each, (str, int, float)) for part in parts for each in part):
            return type(first)([each for part in parts for each in part]) if rank is None else parts[rank]
        if any(len(part) != len(first) for part in parts):
            raise ValueError("lists of different lengths")
        fields = [joined(together, rank) for together in zip(*parts, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    if isinstance(first, (str, int, float, type(None))):
        return parts[rank or 0]
    raise ValueError(f"a batch contains {type(first).__name__}")


def batch_size(data: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor that has one; 0: it has none."""
    if isinstance(data, torch.Tensor):
        return len(data) if data.dim() else 0
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return next((size for part in parts if (size := batch_size(part))), 0)


def _of_mappings(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(each, Mapping) for each in values)


def _samples(parts: Sequence[Any], rank: int | None) -> Any:
    """Join lists with one element for each sample."""
    return type(parts[0])(each for part in parts for each in part) if rank is None else parts[rank]


def _padded(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Give sequences the same length: continue each with the most frequent last value, which is probably the padding."""
    length = max(part.shape[1] for part in parts) if parts[0].dim() > 1 else 0
    if all(part.dim() < 2 or part.shape[1] == length for part in parts):
        return parts
    last = torch.cat([part[:, -1].flatten() for part in parts])
    fill = last.mode().values.item()
    rests = [part.new_full((len(part), length - part.shape[1], *part.shape[2:]), fill) for part in parts]
    return [torch.cat([part, rest], dim=1) for part, rest in zip(parts, rests, strict=True)]
