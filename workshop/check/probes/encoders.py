"""Vocabularies, and the statistics that normalize inputs: what turns the data into the inputs of a model."""

import itertools
import re
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset

from workshop.check.evidence.events import EncodersSeen
from workshop.check.probes.probe import Probe, on

LOOKED = (0, 3)  # steps before which the variables are looked at
VARIABLES = 200  # of a function that are looked at
FEW = 32  # entries of a dictionary whose values are looked at
WORDS, NUMBERS = 200_000, 4096  # the largest vocabulary, and the longest statistics
STATISTICS = re.compile(
    r"(^|_|\b)(mean|means|std|stds|stdev|mu|sigma|var|variance|minimum|maximum|lo|hi|offset)\d?$", re.I
)


class Encoders(Probe):
    """Records the vocabularies and the statistics in the variables of the program, and in the attributes of its objects."""

    writes = (EncodersSeen,)

    @on("before_step")
    def _look(self, optimizer: Optimizer) -> None:
        if self.recorder.steps not in LOOKED:
            return
        vocabularies: dict[str, tuple[int, int]] = {}
        statistics: dict[str, list[float]] = {}
        for name, value in self._variables(self.recorder.frames()):
            if isinstance(value, dict) and (found := _vocabulary(value)):
                vocabularies.setdefault(name, found)
            elif STATISTICS.search(name) and (values := _numbers(value)):
                statistics.setdefault(name, values)
        if vocabularies or statistics:
            self.note_here(EncodersSeen(vocabularies=vocabularies, statistics=statistics))

    def _variables(self, frames: Iterator[FrameType]) -> Iterator[tuple[str, Any]]:
        for frame in itertools.islice(frames, 8):
            for name, value in itertools.islice(list(frame.f_locals.items()), VARIABLES):
                yield name, value
                value = value.dataset if isinstance(value, DataLoader) else value
                value = value.dataset if isinstance(value, Subset) else value
                if type(value) is dict and len(value) <= FEW and all(type(key) is str for key in value):
                    yield from ((f"{name}.{key}", each) for key, each in value.items())
                elif self._of_program(value):
                    yield from ((f"{name}.{part}", each) for part, each in list(vars(value).items())[:VARIABLES])

    def _of_program(self, value: Any) -> bool:
        """Whether a value is an object of a class of the program, other than a model."""
        kind = type(value)
        if isinstance(value, (type, nn.Module, torch.Tensor)) or not hasattr(value, "__dict__"):
            return False
        made = next((each for each in vars(kind).values() if hasattr(each, "__code__")), None)
        return made is not None and bool(self.recorder.own(made.__code__.co_filename))


def _vocabulary(words: dict[Any, Any]) -> tuple[int, int] | None:
    """The length and a checksum of a dictionary from texts to the numbers 0, 1, 2, ... (from any first number on)."""
    if not 8 <= len(words) <= WORDS or not all(type(key) is str and type(value) is int for key, value in words.items()):
        return None
    numbers = sorted(words.values())
    if numbers[-1] - numbers[0] != len(numbers) - 1 or len(set(numbers)) != len(numbers):
        return None
    return len(words), zlib.crc32(repr(sorted(words.items())).encode(errors="replace"))


def _numbers(value: Any) -> list[float]:
    if type(value) is float:
        return [value]
    if hasattr(value, "tolist") and hasattr(value, "dtype") and not getattr(value, "requires_grad", False):
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        if "float" in str(value.dtype) and size <= NUMBERS:
            tensor = torch.as_tensor(value).detach().double().flatten()
            return [float(each) for each in tensor[:64].tolist()]
    return []
