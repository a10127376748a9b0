"""Random splits and orders that the program itself draws, so that rules can compare them between the ranks."""

import random
import reprlib
import zlib
from collections import Counter
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch
from torch.utils import data

from workshop.check.evidence.events import DATA_SET, SUBSET, Drawn
from workshop.check.probes.probe import Function, Probe, after, around

PER_LINE = 6  # draws of a line that are recorded
MOST = 100_000  # elements of a longer list are not compared
OTHERS = 500  # the same, if they are no numbers and texts: the text of an array, for example, takes long
ADDRESS = " at 0x"  # in the text of an object that differs in each process
_SHORT = reprlib.Repr()
_SHORT.maxother = 200


class Draws(Probe):
    """Records the first results of ``random_split``, ``randperm``, ``shuffle``, ``sample`` and ``permutation``."""

    writes = (Drawn,)
    package = "numpy"

    def clear(self) -> None:
        self.seen: Counter[str] = Counter()
        self.divided: Counter[str] = Counter()  # by a DistributedSampler that was created in this line

    @after(data, "random_split")
    @after(data.dataset, "random_split")
    def _split(self, parts: list[Any], dataset: Any, *args: Any, **kwargs: Any) -> None:
        self._note("random_split", range(len(dataset)), [index for part in parts for index in part.indices])

    @after(data.DistributedSampler, "__init__")
    def _sampled(self, result: None, sampler: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        where = self.recorder.where() if self.recorder.called_by_program() else ""  # "": a library creates it
        self.divided[where] += 1
        if self.divided[where] <= PER_LINE:
            parts = int(sampler.num_replicas)
            self.recorder.note(Drawn(name=DATA_SET, size=len(dataset), of=parts, result=parts, where=where))
        if isinstance(dataset, data.Subset) and len(dataset) <= MOST:
            indices = [int(index) for index in dataset.indices]
            self._note(SUBSET, range(len(indices)), indices)

    @after(torch, "randperm")
    def _permute(self, order: torch.Tensor, n: int, *args: Any, **kwargs: Any) -> None:
        if n <= MOST and self.recorder.called_by_program():
            self._note("torch.randperm", range(n), order.tolist())

    @after(random, "shuffle")
    def _shuffle(self, result: None, x: Any, *args: Any, **kwargs: Any) -> None:
        self._note("random.shuffle", x, x)

    @after(random.Random, "shuffle")
    def _shuffle_by(self, result: None, rng: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        self._note("shuffle", x, x)

    @after(lambda numpy: numpy.random, "shuffle")
    def _shuffle_array(self, result: None, x: Any, *args: Any, **kwargs: Any) -> None:
        self._note("numpy.random.shuffle", x, x)

    @after(random, "sample")
    def _sample(self, chosen: list[Any], population: Any, *args: Any, **kwargs: Any) -> None:
        self._note("random.sample", population, chosen)

    @after(random.Random, "sample")
    def _sample_by(self, chosen: list[Any], rng: Any, population: Any, *args: Any, **kwargs: Any) -> None:
        self._note("sample", population, chosen)

    @after(lambda numpy: numpy.random, "permutation")
    def _permutation(self, order: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        self._note("numpy.random.permutation", order, order)

    @around(lambda numpy: numpy.random, "default_rng")
    def _generator(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Return a generator that records its permutations; NumPy's own class cannot be changed."""
        made = original(*args, **kwargs)
        probe, kind = self, type(made)
        if not self.recorder.called_by_program() or kind.__module__ != "numpy.random._generator":
            return made

        class Generator(kind):  # type: ignore[misc,valid-type]  # mypy does not follow a class that is a variable
            def permutation(self, *args: Any, **kwargs: Any) -> Any:
                with probe.recorder.quietly():  # NumPy may call shuffle()
                    order = super().permutation(*args, **kwargs)
                with probe.recorder.guard:
                    probe._note("permutation", order, order)
                return order

            def shuffle(self, *args: Any, **kwargs: Any) -> None:
                super().shuffle(*args, **kwargs)
                with probe.recorder.guard:
                    probe._note("shuffle", args[0], args[0])

        return Generator(made.bit_generator)

    def _note(self, name: str, population: Iterable[Any], result: Iterable[Any]) -> None:
        if self.recorder.quiet or not self.recorder.called_by_program():
            return
        where = self.recorder.where()
        self.seen[where] += 1
        most = MOST if isinstance(next(iter(population), 0), Integral | str) else OTHERS
        if self.seen[where] > PER_LINE or len(population) > most:  # type: ignore[arg-type]  # all have a length
            return
        of, drawn = sorted(map(_text, population)), list(map(_text, result))
        if not any(ADDRESS in text for text in drawn):
            self.recorder.note(Drawn(name=name, size=len(of), of=_checksum(of), result=_checksum(drawn), where=where))


def _text(value: Any) -> str:
    return str(value) if isinstance(value, (int, str)) else _SHORT.repr(value)


def _checksum(texts: list[str]) -> int:
    return zlib.crc32("\0".join(texts).encode(errors="replace"))
