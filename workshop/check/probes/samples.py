"""The batches of data loaders, and the samples of the data set in them."""

import reprlib
import time
import zlib
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, dataloader

from workshop.check.evidence.events import BatchLoaded, EpochSet, Key, Loader, LoaderStarted
from workshop.check.evidence.misuses import (
    DataHeld,
    LoaderMade,
    NothingDropped,
    OtherSamplerSet,
    PassEnded,
    StreamEndless,
    WorkersKept,
)
from workshop.check.probes.contents import attributes, first_tensor, rows
from workshop.check.probes.held import begins_again, ends_when_asked, held, ignores_index
from workshop.check.probes.probe import Function, Probe, after, around, before
from workshop.check.probes.recorder import Batch, Recorder

AGAIN = 4  # batches that a second model may still use
PENDING = 64  # batches kept until a forward pass uses them


class Samples(Probe):
    """Records what a ``DataLoader`` does, and keeps its batches for the forward pass that uses them."""

    writes = (
        LoaderStarted,
        EpochSet,
        BatchLoaded,
        NothingDropped,
        PassEnded,
        LoaderMade,
        DataHeld,
        StreamEndless,
        OtherSamplerSet,
        WorkersKept,
    )

    def __init__(self, recorder: Recorder):
        super().__init__(recorder)
        # By iterator: requested indices, loader, iteration. Loaders are numbered, because id() of an old one may be reused.
        self.asked: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()
        self.loaders: WeakKeyDictionary[Any, Loader] = WeakKeyDictionary()
        self.orders: WeakKeyDictionary[Any, tuple[int | None, int]] = (
            WeakKeyDictionary()
        )  # of the samples so far, and batches
        self.lengths: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # in batches; without those that are not known
        self.iterations: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.made: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # loader -> the line of the program
        self.numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # By loader with persistent workers: the simple attributes of its data set when they were started.
        self.kept: WeakKeyDictionary[Any, dict[str, object]] = WeakKeyDictionary()
        # DistributedSamplers that got an epoch, or that OtherSamplerSet was recorded for.
        self.told: WeakSet[Any] = WeakSet()
        self.loaders_seen = count(1)
        self.drawn: dict[type, bool] = {}  # whether a class of data sets draws its samples, whatever the index is
        self.lists: dict[int, list[object]] = {}  # by length: the first samples of the data sets that are lists

    def clear(self) -> None:
        self.pending: deque[Batch] = deque(maxlen=PENDING)  # not used by a forward pass so far
        self.taken: deque[Batch] = deque(maxlen=AGAIN)  # used by the last forward passes

    def install(self) -> None:
        super().install()
        self.recorder.take_batch = self._take

    @after(dataloader._BaseDataLoaderIter, "_next_index")
    def _next_index(self, indices: Any, iterator: Any) -> None:
        self.asked.setdefault(iterator, deque()).append(indices)

    @around(dataloader._BaseDataLoaderIter, "__next__")
    def _next(self, original: Function, iterator: Any) -> Any:
        start = time.monotonic()
        try:
            data = original(iterator)
        except StopIteration:
            with self.recorder.guard:
                self._end(iterator)
            raise
        seconds = time.monotonic() - start
        with self.recorder.guard:
            asked, tensor = self.asked.get(iterator), first_tensor(data)
            keys = self._keys(getattr(iterator, "_dataset", None), asked.popleft()) if asked else []
            order, batches = self.orders.get(iterator, (0, 0))
            self.orders[iterator] = (
                (zlib.crc32(repr(keys).encode(), order) if keys and order is not None else None),
                batches + 1,
            )
            if not keys and tensor is not None:
                keys = rows(tensor)
            row, pointer = (None, 0) if tensor is None else (rows(tensor[:1]), tensor.data_ptr())
            self.pending.append(Batch(keys, row, pointer, self.loaders.get(iterator, (0, 0))))
            self.recorder.note(BatchLoaded(seconds=seconds))
            self._count(iterator, batches + 1)
        return data

    def _count(self, iterator: Any, batches: int) -> None:
        length = self.lengths.get(iterator, 0)
        begun = self.recorder.steps if batches == 1 else self.recorder.epoch[2]
        self.recorder.epoch = batches, length, begun

    def _end(self, iterator: Any) -> None:
        """Record that an iterator is exhausted, once."""
        (loader, iteration), (order, batches) = self.loaders.get(iterator, (0, 0)), self.orders.pop(iterator, (None, 0))
        if batches:
            self.recorder.note(PassEnded(loader=loader, iteration=iteration, batches=batches, order=order))

    @before(DataLoader, "__init__")
    def _make(self, loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        if self.recorder.original and self.recorder.called_by_program():
            self.made[loader] = self.recorder.where(type(loader))

    @after(DataLoader, "__iter__")
    def _iter(self, iterator: Any, loader: DataLoader[Any]) -> None:
        iteration = self.iterations[loader] = self.iterations.get(loader, 0) + 1
        number = self.numbers[loader] = self.numbers.get(loader) or next(self.loaders_seen)
        self.loaders[iterator] = (number, iteration)
        # Batches that an earlier iteration left over: a later tensor can be at the same address.
        self.pending = deque((each for each in self.pending if each.loader[0] != number), maxlen=PENDING)
        length = None
        with suppress(TypeError):
            length = None if ends_when_asked(loader.dataset) else len(loader)
        self.lengths[iterator] = length or 0
        if iteration == 1 and not any(getattr(each, "drop_last", False) for each in (loader, loader.batch_sampler)):
            self.recorder.note(NothingDropped(loader=number))
        streamed = isinstance(loader.dataset, IterableDataset)
        workers, source = (loader.num_workers, self._source(loader.dataset)) if streamed else (0, "")
        event = LoaderStarted(loader=number, iteration=iteration, length=length, workers=workers, source=source)
        with self.recorder.guard:  # of a DataLoader of the program, the loop over it counts
            self.recorder.note(replace(event, where=self.recorder.where(type(loader))))
        self._look_at_sampler(getattr(loader.batch_sampler, "sampler", loader.sampler), number, iteration)
        if iteration == 1 and loader in self.made:
            self.recorder.note(LoaderMade(loader=number, where=self.made[loader]))
        with self.recorder.guard:
            self._look_at_workers(loader)
        if iteration == 1 and streamed and begins_again(loader.dataset):
            self.recorder.note(StreamEndless(loader=number))
        elif iteration == 1 and not streamed:
            self._note_contents(loader.dataset)

    def _look_at_sampler(self, sampler: Any, number: int, iteration: int) -> None:
        if iteration > 1 and self.told and isinstance(sampler, DistributedSampler) and sampler not in self.told:
            self.told.add(sampler)
            self.recorder.note(OtherSamplerSet(loader=number))

    def _look_at_workers(self, loader: DataLoader[Any]) -> None:
        if not (loader.num_workers and loader.persistent_workers and self.recorder.of_program(loader.dataset)):
            return
        now = {name: each for name, each in attributes(loader.dataset).items() if type(each) in (int, float, str)}
        before = self.kept.setdefault(loader, now)
        if names := [name for name in now if name in before and now[name] != before[name]]:
            self.kept[loader] = now
            where = self.made.get(loader) or self.recorder.where(type(loader))
            self.recorder.note(WorkersKept(names=names, where=where))

    def _note_contents(self, dataset: Any) -> None:
        """Record what a data set holds, if it is not a list, whose samples are marked already."""
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        contents = {} if isinstance(dataset, list | tuple) else held(dataset)
        if contents:
            self.recorder.note(DataHeld(name=type(dataset).__name__, length=len(dataset), contents=contents))

    def _source(self, dataset: Any) -> str:
        if code := getattr(type(dataset).__iter__, "__code__", None):
            name = self.recorder.own(code.co_filename)
            return f"{name}:{code.co_firstlineno}" if name else ""
        return ""

    @before(DistributedSampler, "set_epoch")
    def _set_epoch(self, sampler: Any, epoch: int) -> None:
        self.told.add(sampler)
        self.recorder.note(EpochSet(epoch=int(epoch)))

    def _take(self, tensor: torch.Tensor) -> Batch | None:
        """Return the batch of this input: the one with the same content, else the same memory, else the last one loaded.

        Content comes first, because a loader may prefetch and return copies (as in Accelerate), and memory is reused.
        """
        if (not self.pending and not self.taken) or is_functorch_wrapped_tensor(tensor):
            return None
        row, pointer = rows(tensor[:1]), tensor.data_ptr()
        again = next((each for each in reversed(self.taken) if each.row == row), None)
        if again and all(each.row != row for each in self.pending):
            return again  # a second model, such as a teacher, sees the batch too
        if not self.pending:
            return None
        likeness = [(each.row == row, each.pointer == pointer, number) for number, each in enumerate(self.pending)]
        *_, likest = max(likeness)
        batch = self.pending[likest]
        del self.pending[likest]
        self.taken.append(batch)
        return batch

    def _keys(self, dataset: Any, indices: Iterable[Any]) -> list[Key]:
        """Return the samples at these indices, in the data set below all subsets; empty if the indices are not numbers."""
        try:
            numbers = list(indices)
            while isinstance(dataset, Subset):
                numbers, dataset = [dataset.indices[number] for number in numbers], dataset.dataset
            if type(dataset) not in self.drawn:
                self.drawn[type(dataset)] = ignores_index(type(dataset))
            if self.drawn[type(dataset)]:
                return []
            name, length = type(dataset).__name__, len(dataset)
            if isinstance(dataset, list | tuple):  # all data sets in lists would have the same name
                known, first = self.lists.setdefault(length, []), _marked(dataset[0])
                known += [] if first in known else [first]
                name += f" {known.index(first) + 1}"
            return [(name, length, int(number)) for number in numbers]
        except (TypeError, AttributeError, KeyError, IndexError, ValueError):
            return []


def _marked(sample: object) -> object:
    """What tells a sample from others."""
    tensor = first_tensor(sample)
    return reprlib.repr(sample) if tensor is None else rows(tensor[None])
