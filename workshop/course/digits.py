"""Give the check's runs a small part of the digits: large enough to judge the program, and quick to train on."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from workshop.check.probes.recorder import Recorder
from workshop.data import datasets

TEST_SAMPLES = 47  # a prime number, so no number of processes divides it
USUAL = ("workshop.training.arguments", "workshop.training.models")  # what the exercises import

_read: dict[bool, tuple[np.ndarray, list[int]]] = {}  # for training, for testing: images and labels


def prepare_digits() -> None:
    """Read the digits and import the modules of the exercises once, before the processes are forked."""
    for train in (True, False):
        if train not in _read:
            part = datasets.Digits(train)
            _read[train] = (part.images, part.labels)
    for name in USUAL:
        importlib.import_module(name)


def small_digits(samples: int) -> Callable[[Recorder], None]:
    """Return a function for ``Program.before`` that reduces the data set ``Digits``.

    Args:
        samples: the number of training samples; the test set has ``TEST_SAMPLES``.
    """

    def before(recorder: Recorder) -> None:
        prepare_digits()

        def __init__(self: datasets.Digits, train: bool, transform: Callable[..., object] | None = None) -> None:
            images, labels = _read[train]
            count = samples if train else TEST_SAMPLES
            self.images, self.labels, self.transform = images[:count], labels[:count], transform

        # It is not restored, because the process runs only the program.
        digits: Any = datasets.Digits
        digits.__init__ = __init__

    return before
