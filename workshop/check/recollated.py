"""Batches that cannot be joined along a dimension, such as graphs: the samples of all ranks go through ``collate_fn`` again."""

import io
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from workshop.check.evidence.events import Key
from workshop.check.probes.held import ends_when_asked


@dataclass
class Samples:
    """What a data set returned for a batch, in place of the batch."""

    samples: list[Any]

    def __len__(self) -> int:
        return len(self.samples)


class Drawn:
    """The samples of the present batch of an iterator, and the function that makes batches of samples.

    They are known if the program has its own ``collate_fn`` and the loader has no workers.
    """

    def __init__(self, iterator: Any):
        self.size = 0  # of the data set; 0: unknown
        with suppress(Exception):  # a class of the program may answer with any error
            self.size = 0 if ends_when_asked(iterator._dataset) else len(iterator._dataset)
        self.samples: list[Any] = []
        self.collate: Callable[[list[Any]], Any] | None = None
        fetcher: Any = getattr(iterator, "_dataset_fetcher", None)
        if type(fetcher) is _MapDatasetFetcher and fetcher.auto_collation and fetcher.collate_fn is not default_collate:
            self.collate, fetcher.collate_fn = fetcher.collate_fn, self._note

    def _note(self, samples: list[Any]) -> Any:
        assert self.collate
        self.samples = list(samples)
        return self.collate(samples)


def joins(data: Any, samples: int, joined: Callable[[Sequence[Any]], Any]) -> bool:
    """Whether a batch can be joined with others along the dimension of the samples, as far as one batch shows."""
    try:
        joined([data, data])
    except (ValueError, TypeError, KeyError, RuntimeError):
        return False
    return not _refers(data, samples)


def _refers(data: Any, samples: int) -> bool:
    """Whether a batch contains numbers of rows, such as the edges of a graph: two rows or columns, but not one per sample."""
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, (list, tuple)) else [data]
    return any(
        _refers(each, samples)
        if isinstance(each, (dict, list, tuple))
        else isinstance(each, torch.Tensor)
        and each.dtype == torch.int64
        and each.dim() == 2
        and len(each) != samples
        and 2 in each.shape
        for each in parts
    )


def interleaved(parts: Sequence[Samples]) -> list[Any]:
    """The samples of all ranks in the order in which they were dealt out, one to each rank in turn."""
    longest = max(map(len, parts))
    return [part.samples[number] for number in range(longest) for part in parts if number < len(part)]


def without_known(samples: list[Any], seen: set[Key], repeated: int, pickler: Callable[[io.BytesIO], Any]) -> list[Any]:
    """The samples without those that a sampler has repeated, at most ``repeated``; ``seen`` gets their checksums."""
    marks: list[Key] = []
    for sample in samples:
        pickler(stored := io.BytesIO()).dump(sample)
        marks.append((zlib.crc32(stored.getvalue()),))
    again = [number for number, mark in enumerate(marks) if mark in seen][-repeated:] if repeated > 0 else []
    seen.update(marks)
    return [sample for number, sample in enumerate(samples) if number not in again] or samples
