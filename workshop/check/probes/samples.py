"""The batches that data loaders return, and which samples of the data set they consist of."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, dataloader

from workshop.check.evidence.events import BatchLoaded, EpochSet, Key, Loader, LoaderStarted
from workshop.check.probes.contents import first_tensor, rows
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe
from workshop.check.probes.recorder import Batch, Recorder

PENDING = 64  # batches that are kept until a forward pass takes them


class Samples(Probe):
    """Notes what a ``DataLoader`` does, and keeps its batches for the forward pass that takes them."""

    writes = (LoaderStarted, EpochSet, BatchLoaded)
    always = True

    def __init__(self, recorder: Recorder):
        super().__init__(recorder)
        # The indices that an iterator has asked for, and not yet returned; its loader, and the number of the iteration.
        self.asked: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self.loaders: WeakKeyDictionary[Any, Loader] = WeakKeyDictionary()
        self.iterations: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def clear(self) -> None:
        """Forget the batches that no forward pass has taken."""
        self.pending: deque[Batch] = deque(maxlen=PENDING)

    def install(self) -> None:
        """Replace the methods of loaders and their iterators."""
        self.patches.wrap(dataloader._BaseDataLoaderIter, "_next_index", self._next_index)
        self.patches.wrap(dataloader._BaseDataLoaderIter, "__next__", self._next)
        self.patches.wrap(DataLoader, "__iter__", self._iter)
        self.patches.wrap(DistributedSampler, "set_epoch", self._set_epoch)
        self.recorder.take_batch = self._take

    def _next_index(self, original: Function) -> Function:
        def _next_index(iterator: Any) -> Any:
            indices = original(iterator)
            with self.recorder.guard:
                self.asked.setdefault(iterator, deque()).append(indices)
            return indices

        return _next_index

    def _next(self, original: Function) -> Function:
        def __next__(iterator: Any) -> Any:
            start = time.monotonic()
            data = original(iterator)
            seconds = time.monotonic() - start
            with self.recorder.guard:
                self._loaded(iterator, data, seconds)
            return data

        return __next__

    def _loaded(self, iterator: Any, data: Any, seconds: float) -> None:
        asked = self.asked.get(iterator)
        indices = asked.popleft() if asked else None
        tensor = first_tensor(data)
        keys = [] if indices is None else _keys(getattr(iterator, "_dataset", None), indices)
        if not keys and tensor is not None:
            keys = rows(tensor)
        row, pointer = (None, 0) if tensor is None else (rows(tensor[:1]), tensor.data_ptr())
        self.pending.append(Batch(keys, row, pointer, self.loaders.get(iterator, (0, 0))))
        self.recorder.note(BatchLoaded(seconds=seconds))

    def _iter(self, original: Function) -> Function:
        def __iter__(loader: DataLoader[Any]) -> Any:
            iterator = original(loader)
            with self.recorder.guard:
                iteration = self.iterations[loader] = self.iterations.get(loader, 0) + 1
                self.loaders[iterator] = (id(loader), iteration)
                where = self.recorder.where()
                self.recorder.note(
                    LoaderStarted(loader=id(loader), iteration=iteration, length=_length(loader), where=where)
                )
            return iterator

        return __iter__

    def _set_epoch(self, original: Function) -> Function:
        def set_epoch(sampler: Any, epoch: int) -> Any:
            with self.recorder.guard:
                self.recorder.note(EpochSet(epoch=int(epoch)))
            return original(sampler, epoch)

        return set_epoch

    def _take(self, tensor: torch.Tensor) -> Batch | None:
        """The batch that this input came from: the same content, else the same memory, else the one loaded last.

        Content first: a loader may load ahead and return copies (Accelerate's, to "cpu:0"), and memory is used again.
        """
        if not self.pending:
            return None
        row = rows(tensor[:1])

        def likeness(number: int) -> tuple[bool, bool, int]:
            batch = self.pending[number]
            return batch.row == row, batch.pointer == tensor.data_ptr(), number

        likest = max(range(len(self.pending)), key=likeness)
        batch = self.pending[likest]
        del self.pending[likest]
        return batch


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _keys(dataset: Any, indices: Iterable[Any]) -> list[Key]:
    """The samples behind these indices: those in the data set under all subsets. Empty where the indices are not numbers."""
    try:
        numbers = list(indices)
        while isinstance(dataset, Subset):
            numbers = [dataset.indices[number] for number in numbers]
            dataset = dataset.dataset
        return [(type(dataset).__name__, len(dataset), int(number)) for number in numbers]
    except (TypeError, AttributeError, KeyError, IndexError, ValueError):
        return []
