"""The random states with which the worker processes of a DataLoader begin."""

import random
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Subset, get_worker_info
from torch.utils.data._utils import fetch

from workshop.check.evidence.misuses import WorkerBegun
from workshop.check.probes.contents import attributes
from workshop.check.probes.probe import Function, Probe, around


class Workers(Probe):
    """Records, in each worker, which random generators its first batch uses, and their states before."""

    writes = (WorkerBegun,)

    def clear(self) -> None:
        self.begun = False  # a worker is a forked process

    @around(fetch._MapDatasetFetcher, "fetch")
    def _fetch(self, original: Function, fetcher: Any, indices: Any) -> Any:
        info = None if self.begun else get_worker_info()
        if info is None:
            return original(fetcher, indices)
        self.begun = True
        where, states = "", dict[str, int]()
        with self.recorder.guard:
            where, states = self.recorder.where(), dict(self._states(fetcher.dataset))
        result = original(fetcher, indices)
        with self.recorder.guard:
            changed = {name for name, state in self._states(fetcher.dataset) if states.get(name) != state}
            used = {name: state for name, state in states.items() if name in changed}
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.recorder.note(WorkerBegun(rank=rank, worker=info.id, states=used, where=where))
        return result

    def _states(self, dataset: Any) -> Iterator[tuple[str, int]]:
        """Yield the state of each generator: of torch, Python and NumPy, of the data set, and of objects that it has."""
        yield "torch", zlib.crc32(torch.get_rng_state().numpy().tobytes())
        yield "random", zlib.crc32(repr(random.getstate()).encode())
        numpy = sys.modules.get("numpy")
        if numpy:
            yield "numpy.random", zlib.crc32(repr(numpy.random.get_state()).encode())
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        for name, value in list(attributes(dataset).items()):
            yield from _of_generator(f"self.{name}", value)
            if self.recorder.of_program(value):
                for inner, each in list(attributes(value).items()):
                    yield from _of_generator(f"self.{name}.{inner}", each)


def _of_generator(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yield the name and a checksum of the state, if a value is a random generator."""
    state: object = None
    if isinstance(value, torch.Generator):
        state = value.get_state().numpy().tobytes()
    elif isinstance(value, random.Random):
        state = value.getstate()
    elif type(value).__module__.startswith("numpy.random") or hasattr(type(value), "bit_generator"):
        state = value.bit_generator.state if hasattr(type(value), "bit_generator") else value.get_state()
    if state is not None:
        yield name, zlib.crc32(repr(state).encode())
