"""Let one process evaluate a model with the parameters that it has in a run with several processes after the same step.

Then the numbers of both evaluations can be compared, also if the trainings differ.
"""

import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workshop.check.comparing import UNSTORED, TensorPickler
from workshop.check.probes.contents import is_fsdp1
from workshop.check.probes.recorder import Recorder
from workshop.tensors import is_dtensor, own_part

STORED = 400_000_000  # bytes of all parameters that are stored
# The number of the evaluation (between two, one process may take other steps), that of the model among the evaluated ones, and
# that of its parameters there.
Key = tuple[int, int, int]


def store(file: Path) -> Callable[[Recorder], None]:
    """Return a function for ``Program.before`` with which rank 0 appends the parameters of its evaluations to a file."""

    def before(recorder: Recorder) -> None:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        left = STORED

        def evaluates(key: Key, model: nn.Module) -> bool:
            nonlocal left
            with recorder.quietly():
                tensors = {name: _whole(each) for name, each in _tensors(model)}  # on all ranks
            if dist.is_initialized() and dist.get_rank():
                return True
            stored = io.BytesIO()
            with suppress(*UNSTORED):
                TensorPickler(stored).dump((key, tensors))
                left -= stored.tell()
            if stored.tell() > 0 and left > 0:
                os.write(opened, stored.getvalue())
            return stored.tell() > 0 and left > 0

        _each_evaluation(recorder, evaluates)

    return before


def restore(file: Path) -> Callable[[Recorder], None]:
    """Return a function for ``Program.before`` that gives the evaluated models these parameters."""

    def before(recorder: Recorder) -> None:
        given: dict[Key, dict[str, torch.Tensor]] = {}
        with open(file, "rb") as stored, suppress(EOFError, pickle.UnpicklingError):
            while True:
                key, tensors = pickle.load(stored)
                given[key] = tensors

        def evaluates(key: Key, model: nn.Module) -> bool:
            own, stored = dict(_tensors(model)), given.get(key, {})
            if {name: each.shape for name, each in own.items()} != {name: each.shape for name, each in stored.items()}:
                return False
            with torch.no_grad():
                for name, each in own.items():
                    own_part(each).copy_(stored[name])
            return True

        _each_evaluation(recorder, evaluates)

    return before


def _each_evaluation(recorder: Recorder, evaluates: Callable[[Key, nn.Module], bool]) -> None:
    """Call a function before a model is evaluated with new parameters; it returns whether both runs have the same ones."""
    numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
    # By the number of the model: that of the evaluation, that of its parameters, and their mark.
    present: dict[int, tuple[int, int, int]] = {}
    agree: dict[Key, bool] = {}
    evaluations: dict[int, int] = {}  # by the steps before
    called: WeakSet[nn.Module] = WeakSet()

    def before(model: nn.Module) -> None:
        model = _whole_model(model, called)
        number = numbers.setdefault(model, len(numbers))
        now = evaluations.setdefault(recorder.steps, len(evaluations))
        last, version, mark = present.get(number, (-1, 0, 0))
        if last != now or mark != _mark(model):
            version = version + 1 if last == now else 0
            key = now, number, version
            partitioned = any(each.numel() == 0 for each in model.parameters())  # by ZeRO stage 3
            agree[key] = not is_fsdp1(model) and not partitioned and evaluates(key, model)
            present[number] = now, version, _mark(model)
        recorder.parameters_given = all(same for key, same in agree.items() if key[0] == now)

    recorder.before_evaluation.append(before)
    recorder.before_forward.append(
        lambda model, *_: called.add(model.module if isinstance(model, DistributedDataParallel) else model)
    )


def _whole_model(part: nn.Module, called: Iterable[nn.Module]) -> nn.Module:
    """The called model of which a module is a part: a program may evaluate with a method of it, which calls only parts."""
    own = set(map(id, part.parameters()))
    return next((each for each in called if own < set(map(id, each.parameters()))), part)


def _mark(model: nn.Module) -> int:
    """A number that changes when parameters change in place, or are exchanged."""
    return sum(each._version + each.data_ptr() for each in map(own_part, model.parameters()))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or what all ranks together have of a DTensor."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
