"""Vocabularies, and the statistics that normalize inputs: what turns the data into the inputs of a model."""

import itertools
import multiprocessing
import os
import re
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset

from workshop.check.evidence.events import BY_HASH, EncodersSeen
from workshop.check.probes.contents import attributes
from workshop.check.probes.probe import Probe, before, on

LOOKED = (0, 3)  # steps before which the variables are looked at
VARIABLES = 200  # of a function that are looked at
FEW = 32  # entries of a dictionary whose values are looked at
COMPARED, IN_ORDER = 1000, 0.8  # words whose hashes are compared, and the share of neighbors in the order of a set
OBJECTS = ("broadcast_object_list", "all_gather_object", "scatter_object_list", "recv_object_list")
TENSORS = ("broadcast", "all_gather", "all_gather_into_tensor", "scatter", "recv")
WORDS, NUMBERS = 200_000, 4096  # the largest vocabulary, and the longest statistics
STATISTICS = re.compile(
    r"(^|_|\b)(mean|means|std|stds|stdev|mu|sigma|var|variance|minimum|maximum|lo|hi|offset)\d?$", re.I
)


class Encoders(Probe):
    """Records the vocabularies and the statistics in the variables of the program, and in the attributes of its objects."""

    writes = (EncodersSeen,)
    differs = False  # whether the order of a set of texts would differ between new interpreters

    @before(c10d, *OBJECTS)
    def _receive(self, *args: Any, **kwargs: Any) -> None:
        self.recorder.received = self.recorder.received or not self.recorder.quiet

    @before(c10d, *TENSORS)
    def _receive_bytes(self, *args: Any, **kwargs: Any) -> None:
        first = args[0] if args else next(iter(kwargs.values()), None)
        tensor = first[0] if isinstance(first, list) and first else first
        if getattr(tensor, "dtype", None) in (torch.uint8, torch.int8):
            self._receive()

    @on("before_step")
    def _look(self, optimizer: Optimizer) -> None:
        if self.recorder.steps not in LOOKED:
            return
        if not self.recorder.steps:
            self.differs = self._differs_by_hash()
        vocabularies: dict[str, tuple[int, int]] = {}
        statistics: dict[str, list[float]] = {}
        for name, value in self._variables(self.recorder.frames()):
            if isinstance(value, dict) and (found := _vocabulary(value)):
                if self.differs and _by_hash(value):
                    found = found[0], BY_HASH + dist.get_rank()
                vocabularies.setdefault(name, found)
            elif STATISTICS.search(name) and (values := _numbers(value)):
                statistics.setdefault(name, values)
        if vocabularies or statistics:
            self.note_here(EncodersSeen(vocabularies=vocabularies, statistics=statistics))

    def _differs_by_hash(self) -> bool:
        """Whether the program has numbered all texts in this process, and a new interpreter would have hashes of its own."""
        launched = multiprocessing.parent_process() is None and dist.is_initialized()
        return launched and not self.recorder.received and "PYTHONHASHSEED" not in os.environ

    def _variables(self, frames: Iterator[FrameType]) -> Iterator[tuple[str, Any]]:
        for frame in itertools.islice(frames, 8):
            for name, value in itertools.islice(list(frame.f_locals.items()), VARIABLES):
                yield name, value
                value = value.dataset if isinstance(value, DataLoader) else value
                value = value.dataset if isinstance(value, Subset) else value
                if type(value) is dict and len(value) <= FEW and all(type(key) is str for key in value):
                    yield from ((f"{name}.{key}", each) for key, each in value.items())
                elif isinstance(value, nn.Module) and any(each.requires_grad for each in value.parameters()):
                    continue  # one that is not trained may prepare the inputs
                elif self.recorder.of_program(value):
                    parts = attributes(value) | attributes(value).get("_buffers", {})
                    yield from ((f"{name}.{part}", each) for part, each in list(parts.items())[:VARIABLES])


def _vocabulary(words: dict[Any, Any]) -> tuple[int, int] | None:
    """The length and a checksum of a dictionary from texts to the numbers 0, 1, 2, ... (from any first number on)."""
    if not 8 <= len(words) <= WORDS or not all(type(key) is str and type(value) is int for key, value in words.items()):
        return None
    numbers = sorted(words.values())
    if numbers[-1] - numbers[0] != len(numbers) - 1 or len(set(numbers)) != len(numbers):
        return None
    return len(words), zlib.crc32(repr(sorted(words.items())).encode(errors="replace"))


def _by_hash(words: dict[str, int]) -> bool:
    """Whether the numbers of most words follow their hashes, as in the order of a set; its table can have several sizes."""
    hashes = [hash(word) for word in sorted(words, key=words.__getitem__)[-COMPARED:]]
    for bits in range(3, len(words).bit_length() + 4):
        places = [each % (1 << bits) for each in hashes]
        in_order = sum(one <= other for one, other in itertools.pairwise(places))
        if 1 << bits >= len(words) and in_order > IN_ORDER * (len(places) - 1):
            return True
    return False


def _numbers(value: Any) -> list[float]:
    if type(value) is float:
        return [value]
    if hasattr(type(value), "tolist") and hasattr(type(value), "dtype") and not getattr(value, "requires_grad", False):
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        if "float" in str(value.dtype) and size <= NUMBERS:
            tensor = torch.as_tensor(value).detach().double().flatten()
            return [float(each) for each in tensor[:64].tolist()]
    return []
