"""A small part of the digits, which the check's runs train on: large enough to judge, and quick."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from workshop.check.probes.recorder import Recorder
from workshop.data import datasets

TEST_SAMPLES = 47  # a prime number: it divides by no number of processes
USUAL = ("workshop.training.arguments", "workshop.training.models")  # what the exercises import

_read: dict[bool, tuple[np.ndarray, list[int]]] = {}  # for training, for testing: images and labels


def prepare_digits() -> None:
    """Read the digits, and import what the exercises import, once; the forked processes have it then."""
    for train in (True, False):
        if train not in _read:
            part = datasets.Digits(train)
            _read[train] = (part.images, part.labels)
    for name in USUAL:
        importlib.import_module(name)


def small_digits(samples: int) -> Callable[[Recorder], None]:
    """What gives ``Digits`` only a part of its samples, for ``Program.before``.

    Args:
        samples: how many to train on; there are ``TEST_SAMPLES`` to test on.
    """

    def before(recorder: Recorder) -> None:
        prepare_digits()

        def __init__(self: datasets.Digits, train: bool, transform: Callable[..., object] | None = None) -> None:
            images, labels = _read[train]
            count = samples if train else TEST_SAMPLES
            self.images, self.labels, self.transform = images[:count], labels[:count], transform

        # For good: the process runs nothing but the program, and ends with it.
        digits: Any = datasets.Digits
        digits.__init__ = __init__

    return before
