"""Give one process the global batches of several ranks, so that any program can be compared with itself on one process.

``keep`` stores the first batches of each loader on each rank, below the Python code of the ``DataLoader``. In a later run,
``replace`` gives each rank these batches again, or one process the joined ones, and tames the random numbers of the steps.
``replace_all`` also ends each epoch of one process where it ended for the ranks, so that a whole training can be compared.
"""

import copy
import io
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial, wraps
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.data import dataloader

from workshop.check.evidence.events import Key
from workshop.check.probes.contents import content, rows
from workshop.check.probes.recorder import Recorder
from workshop.check.recollated import Drawn, Samples, interleaved, joins, without_known
from workshop.check.taming import tame

ITERATIONS = 40  # iterations of a loader of which batches are kept
BATCHES = 256  # of each of them
LARGEST = 32_000_000  # bytes of a batch
STORED = 64_000_000  # bytes of all batches of a rank
END, LENGTH = -1, -2  # in place of the number of a batch: how many there were, and the length of the loader
UNSTORED = (
    pickle.PicklingError,
    TypeError,
    AttributeError,
    RecursionError,
)  # what the pickle of an unusual batch raises
# A rank has no such batch, the sizes do not fit, or a class of the program cannot be imported.
UNJOINED = (KeyError, ValueError, TypeError, RuntimeError, AttributeError, pickle.UnpicklingError)
Iteration = tuple[int, int]  # the number of a loader, in the order in which they are made, and of an iteration over it
Place = tuple[Iteration, int]  # the iteration, and the number of the batch in it
Field = tuple[object, ...]  # the keys and indices that lead to a tensor in a batch
Fills = Callable[[], dict[Field, float]]


def keep(file: Path) -> Callable[[Recorder], None]:
    """Return a function for ``Program.before`` that appends the batches of each rank to a file."""

    def before(recorder: Recorder) -> None:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # now: the probes forbid it later
        left, once = STORED, set()

        def kept(place: Place, data: Any, drawn: Drawn | None) -> Any:
            nonlocal left
            if place[0][1] >= ITERATIONS or place[1] >= BATCHES or data is None or place in once:
                return data
            if place[1] in (END, LENGTH):  # a program may ask for a batch once more after the end
                once.add(place)
            with suppress(*UNSTORED):  # a batch may be anything
                rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
                own = Samples(drawn.samples) if drawn and drawn.samples else None
                part = data if own is None or joins(data, len(own), joined) else own
                value, stored = io.BytesIO(), io.BytesIO()
                TensorPickler(value).dump(part)
                pickle.dump((place, rank, batch_size(part), value.getvalue()), stored)
                left = left - stored.tell() if stored.tell() <= min(LARGEST, left) else 0
                if left:
                    os.write(opened, stored.getvalue())
            return data

        _each_batch(kept)

    return before


def replace(file: Path, ranks: int, padded: bool = True) -> Callable[[Recorder], None]:
    """Return a function for ``Program.before`` that gives a rank its stored batches, or one process those of all ranks.

    ``padded``: the batches of the ranks are as wide as the joined one. A program fails with them if a batch contains its widths.
    """
    return partial(_replace, file, ranks, False, padded)


def replace_all(file: Path, ranks: int) -> Callable[[Recorder], None]:
    """The same for a whole training. One process evaluates the samples of the ranks in turn, as samplers deal them out."""
    return partial(_replace, file, ranks, True, True)


def without_chance(recorder: Recorder) -> None:
    """For ``Program.before`` of a program without a loader: tame the random numbers as soon as it has an optimizer.

    Earlier, the parameters need random values; later, the program may have drawn its first batch.
    """
    created: Any = torch.optim.Optimizer.__init__
    begun = False

    @wraps(created)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        nonlocal begun
        created(self, *args, **options)
        if not begun:
            begun = True
            tame(lambda: 0)
            # The samples that a program chooses with it are all the same, so a mean over them does not depend on their number.
            torch.randperm = lambda n, **options: torch.zeros(n, dtype=torch.int64)

    kind: Any = torch.optim.Optimizer
    kind.__init__ = __init__


def _replace(file: Path, ranks: int, whole: bool, padded: bool, recorder: Recorder) -> None:
    # The batches of the ranks are unpickled when they are needed: by then, the classes of the program exist.
    parts: dict[Place, dict[int, bytes]] = {}
    counts: dict[Iteration, int] = {}  # samples of all batches
    file.touch()  # the ranks may have ended before their first batch
    with open(file, "rb") as stored, suppress(EOFError, pickle.UnpicklingError):
        while True:
            place, rank, samples, value = pickle.load(stored)
            parts.setdefault(place, {})[rank] = value
            counts[place[0]] = counts.get(place[0], 0) + samples
    recorder.opens_batches = True

    ends = _ends(parts)
    known: dict[int, int] = {}  # the number of iterations of each loader
    for each, _ in parts:
        known[each[0]] = max(known.get(each[0], 0), each[1] + 1)
    size, part, begun, fills = 0, 0, False, _fills_of(parts)  # of the batch, and of its part of a rank
    seen: dict[Iteration, set[Key]] = {}  # the samples that one process has evaluated

    def replaced(place: Place, data: Any, drawn: Drawn | None) -> Any:
        nonlocal size, part, begun
        iteration = loader, number = place[0]
        if whole and number >= known.get(loader, number + 1):  # a training that goes on for longer than before
            place = (loader, number % known[loader]), place[1]
        own = dist.get_rank() if dist.is_initialized() and dist.get_world_size() > 1 else None
        if place[1] in (END, LENGTH):
            usual = ends.get(place[0], data) if place[1] == END else data
            stored = [pickle.loads(each) for each in parts.get(place, {}).values()] or [usual]
            return max(stored) if whole and own is None else data
        if not begun:
            begun = True
            tame(lambda: size, lambda: part)  # not earlier, because the parameters need random values
        # Without the joined batch the samples differ: the rules do not compare the first step, and a whole training fails.
        with suppress(*() if whole else UNJOINED):
            of_ranks = _unpickled(parts[place], ranks, whole, alone=own is None)
            if own is not None and len(of_ranks) < ranks:  # at the end of an epoch, some ranks have no batch any more
                of_ranks, own = [pickle.loads(parts[place][own])], 0
            part = batch_size(of_ranks[own or 0])
            evaluates = whole and own is None and not torch.is_grad_enabled()
            last = drawn and drawn.size and ends.get(place[0]) == place[1] + 1
            repeated = counts[place[0]] - drawn.size if drawn and last else 0
            if drawn and drawn.collate and isinstance(of_ranks[0], Samples):
                samples = interleaved(of_ranks) if own is None else of_ranks[own].samples
                if evaluates:
                    samples = without_known(samples, seen.setdefault(iteration, set()), repeated, TensorPickler)
                size = len(samples)
                return drawn.collate(samples)
            data = joined(of_ranks, own, fills) if padded or own is None else of_ranks[own]
            if evaluates:
                data = dealt(data, [batch_size(each) for each in of_ranks])
                data = _once(data, seen.setdefault(iteration, set()), repeated)
        size = batch_size(data)
        return data

    _each_batch(replaced)
    if whole:
        _without_repeated_samples()


def _ends(places: Iterable[Place]) -> dict[Iteration, int]:
    """After how many batches each iteration ended, also if the program has left the loop before the end of the loader."""
    ends: dict[Iteration, int] = {}
    for iteration, number in places:
        if 0 <= number < BATCHES - 1:
            ends[iteration] = max(ends.get(iteration, 0), number + 1)
    return ends


def _unpickled(parts: dict[int, bytes], ranks: int, whole: bool, alone: bool) -> list[Any]:
    """The batches of the ranks; in a whole training, one process gets a batch once that all ranks have loaded alike."""
    if whole and alone and len(set(parts.values())) == 1:
        return [pickle.loads(next(iter(parts.values())))]
    return [pickle.loads(parts[rank]) for rank in range(ranks) if not whole or rank in parts]


def _without_repeated_samples() -> None:
    """Let Accelerate remove no samples from the batches of one process, because the joined ones contain each sample once."""
    if accelerate := sys.modules.get("accelerate"):
        gathered = accelerate.Accelerator.gather_for_metrics

        def gather_for_metrics(self: Any, data: Any, *args: Any, **options: Any) -> Any:
            return data if self.num_processes == 1 else gathered(self, data, *args, **options)

        accelerate.Accelerator.gather_for_metrics = gather_for_metrics


class TensorPickler(pickle.Pickler):
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


def _once(data: Any, seen: set[Key], repeated: int) -> Any:
    """A batch without the samples that a sampler has repeated in the last batch, to give all ranks the same number.

    ``seen``: the samples of the earlier batches; ``repeated``: how many the sampler has repeated, 0 before the last batch.
    """
    first = next(_tensors(data), None)
    if first is None:
        return data
    found = rows(first)
    again = [number for number, row in enumerate(found) if row in seen][-repeated:] if repeated > 0 else []
    seen.update(found)
    new = [number for number in range(len(found)) if number not in again]
    return _chosen(data, len(found), new) if 0 < len(new) < len(found) else data


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch that have a sample in each row."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else [data]
    for part in parts:
        if not isinstance(part, torch.Tensor):
            yield from _tensors(part) if isinstance(part, (Mapping, list, tuple)) else ()
        elif part.dim():
            yield part


def _each_batch(change: Callable[[Place, Any, Drawn | None], Any]) -> None:
    """Pass each of the first batches through a function, together with its place and what the data set returned for it.

    The function also gets the length of each loader, and the number of batches of each iteration at its END: at the end, and
    before each batch with None, where it can return the number of batches after which the iteration ends.
    """
    iterations: WeakKeyDictionary[Any, tuple[Iteration, count[int], Drawn]] = WeakKeyDictionary()  # by the iterator
    loaders: WeakKeyDictionary[Any, tuple[int, count[int]]] = WeakKeyDictionary()
    kind: Any = dataloader.DataLoader
    made, length, begin, following = kind.__init__, kind.__len__, kind.__iter__, dataloader._BaseDataLoaderIter.__next__
    created = count()

    @wraps(made)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        if self not in loaders:
            loaders[self] = next(created), count()

    @wraps(length)
    def __len__(self: Any) -> int:
        return int(change(((loaders[self][0], 0), LENGTH), length(self), None)) if self in loaders else length(self)

    @wraps(begin)
    def __iter__(self: Any) -> Any:
        iterator = begin(self)
        if self in loaders:
            iterations[iterator] = (loaders[self][0], next(loaders[self][1])), count(), Drawn(iterator)
        return iterator

    @wraps(following)
    def __next__(self: Any) -> Any:
        if self not in iterations:
            return following(self)
        iteration, numbers, drawn = iterations[self]
        batch = next(numbers)
        end = change((iteration, END), None, None)
        if end is not None and batch >= end:
            raise StopIteration
        try:
            data = following(self)
        except StopIteration:
            change((iteration, END), batch, None)
            raise
        return change((iteration, batch), data, drawn)

    kind.__init__, kind.__len__, kind.__iter__, dataloader._BaseDataLoaderIter.__next__ = (
        __init__,
        __len__,
        __iter__,
        __next__,
    )


def joined(
    parts: Sequence[Any], rank: int | None = None, fills: Fills = dict, field: Field = (), sizes: Sequence[int] = ()
) -> Any:
    """Join the batches of several ranks: tensors along their first dimension, and the same fields with each other.

    Args:
        parts: the batches, in the order of the ranks.
        rank: return only the part of this rank, padded to the size of the joined batch.
        fills: returns the padding of each field; the others get what is probably theirs.
        field: where the parts are in the batches.
        sizes: the numbers of samples of the batches, if the parts are inside of them.

    Raises:
        ValueError: they cannot be joined.
    """
    first, inside = parts[0], bool(sizes)
    sizes = sizes or [batch_size(each) for each in parts]
    if isinstance(first, torch.Tensor):
        if not first.dim():
            return parts[rank or 0]
        parts = _padded(parts, fills, field)
        return torch.cat(list(parts)) if rank is None else parts[rank]
    if isinstance(first, Mapping):
        whole: Any = copy.copy(first)
        for key in first:
            whole[key] = joined([part[key] for part in parts], rank, fills, (*field, key), sizes)
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
        of_samples = inside and all(map(_one_per_sample, parts, sizes))
        if of_samples or all(isinstance(each, (str, int, float)) for part in parts for each in part):
            return type(first)([each for part in parts for each in part]) if rank is None else parts[rank]
        if any(len(part) != len(first) for part in parts):
            raise ValueError("lists of different lengths")
        fields = [joined(each, rank, fills, (*field, at), sizes) for at, each in enumerate(zip(*parts, strict=True))]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    if isinstance(first, (str, int, float, type(None))):
        return parts[rank or 0]
    raise ValueError(f"a batch contains {type(first).__name__}")


def dealt(data: Any, sizes: Sequence[int]) -> Any:
    """Order a joined batch as it was dealt out to the ranks, one sample each in turn; ``sizes`` are those of their parts."""
    places = [(number, rank) for rank, size in enumerate(sizes) for number in range(size)]
    return _chosen(data, len(places), sorted(range(len(places)), key=places.__getitem__))


def _chosen(part: Any, size: int, order: Sequence[int]) -> Any:
    """The samples with these numbers, in this order, of a batch of some size."""
    if isinstance(part, torch.Tensor):
        return part[list(order)] if part.dim() and len(part) == size else part
    if isinstance(part, Mapping):
        whole: Any = copy.copy(part)
        for key in part:
            whole[key] = _chosen(part[key], size, order)
        return whole
    if isinstance(part, (list, tuple)):
        tensors = any(isinstance(each, torch.Tensor) and each.dim() for each in part)
        if len(part) == size and (not tensors or _one_per_sample(part, size)):
            return type(part)(part[number] for number in order)
        fields = [_chosen(each, size, order) for each in part]
        return type(part)(*fields) if hasattr(part, "_fields") else type(part)(fields)
    return part


def _one_per_sample(part: Any, size: int) -> bool:
    """Whether a list has a tensor for each of this number of samples, such as points of different numbers."""
    tensors = len(part) == size and all(isinstance(each, torch.Tensor) for each in part)
    return tensors and not all(each.dim() and len(each) == size for each in part)


def batch_size(data: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor that has one; 0: it has none."""
    if isinstance(data, torch.Tensor):
        return len(data) if data.dim() else 0
    if isinstance(data, Samples):
        return len(data)
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return next((size for part in parts if (size := batch_size(part))), 0)


def _of_mappings(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(each, Mapping) for each in values)


def _samples(parts: Sequence[Any], rank: int | None) -> Any:
    """Join lists with one element for each sample."""
    return type(parts[0])(each for part in parts for each in part) if rank is None else parts[rank]


def _padded(parts: Sequence[torch.Tensor], fills: Fills, field: Field) -> Sequence[torch.Tensor]:
    """Give sequences the same length: continue each with what is probably the padding."""
    length = max(part.shape[1] for part in parts) if parts[0].dim() > 1 else 0
    if all(part.dim() < 2 or part.shape[1] == length for part in parts):
        return parts
    known = fills()
    fill = known[field] if field in known else _padding(parts)
    rests = [part.new_full((len(part), length - part.shape[1], *part.shape[2:]), fill) for part in parts]
    return [torch.cat([part, rest], dim=1) for part, rest in zip(parts, rests, strict=True)]


def _fills_of(parts: dict[Place, dict[int, bytes]]) -> Fills:
    """Return a function that finds the padding of each field in the stored batches, once it is needed."""

    @cache
    def fills() -> dict[Field, float]:
        with suppress(*UNJOINED):
            return paddings(pickle.loads(each) for of_ranks in parts.values() for each in of_ranks.values())
        return {}

    return fills


def paddings(batches: Iterable[Any]) -> dict[Field, float]:
    """The probable padding of each field: a single batch shows none if its sequences have the same length."""
    found: dict[Field, list[torch.Tensor]] = {}
    for batch in batches:
        for field, tensor in _fields(batch):
            found.setdefault(field, []).append(tensor)
    return {field: _padding(tensors) for field, tensors in found.items()}


def _fields(data: Any, field: Field = ()) -> Iterator[tuple[Field, torch.Tensor]]:
    """Yield the tensors of a batch that may be padded, and where they are in it."""
    if isinstance(data, torch.Tensor):
        if data.dim() > 1 and data.numel():
            yield field, data
    elif isinstance(data, (Mapping, list, tuple)):
        for at, part in data.items() if isinstance(data, Mapping) else enumerate(data):
            yield from _fields(part, (*field, at))


def _padding(parts: Sequence[torch.Tensor]) -> float:
    """The value that sequences repeat most often at their ends; if none does, the most frequent last value."""
    repeated = Counter[float]()
    for part in parts:
        series = part.movedim(1, -1).flatten(0, -2)
        runs = (series == series[:, -1:]).flip(-1).long().cumprod(-1).sum(-1) - 1
        for value in series[runs > 0, -1].unique():
            repeated[value.item()] += int(runs[series[:, -1] == value].sum())
    last = torch.cat([part[:, -1].flatten() for part in parts])
    return max(repeated, key=repeated.__getitem__) if repeated else last.mode().values.item()
