"""What the variables of a program hold before a step: numbers, tensors that no parameter list has, and random generators."""

import itertools
import random
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from workshop.check.evidence.events import VariablesSeen
from workshop.check.probes.contents import attributes, content
from workshop.check.probes.recorder import Recorder

FRAMES, VARIABLES = 8, 200  # functions, and variables of each, that are recorded
LAYERS = 100  # of a model whose attributes are recorded
ELEMENTS = 10_000  # of a tensor that count


def variables(recorder: Recorder) -> VariablesSeen:
    """Return what the functions of the program that are running hold: in their variables, and in attributes of these."""
    numbers: dict[str, float] = {}
    held: dict[str, float] = {}  # by attributes of variables; variables of the same name come first
    states: dict[str, int] = {}
    for frame in itertools.islice(recorder.frames(), FRAMES):
        found = dict(frame.f_locals)
        found |= {f"self.{name}": value for name, value in attributes(found.get("self")).items()}
        for name, value in itertools.islice(found.items(), VARIABLES):
            if type(value) in (int, float):
                numbers.setdefault(name, value)
            elif (state := _random_state(value)) is not None:
                states.setdefault(name, state)
            else:
                for part, each in _attributes(recorder, value):
                    if (norm := _norm(each)) is not None:
                        held.setdefault(f"{name}.{part}", norm)
    return VariablesSeen(numbers=numbers | held, states=states)


def norms(recorder: Recorder) -> dict[str, float]:
    """Return the numbers in variables whose names say that they are norms, such as ``grad_norm``; the inner functions first."""
    found: dict[str, float] = {}
    for frame in itertools.islice(recorder.frames(), FRAMES):
        for name, value in itertools.islice(dict(frame.f_locals).items(), VARIABLES):
            if "norm" in name.lower() and (type(value) is float or (_counts(value) and value.numel() == 1)):
                found.setdefault(name, float(value))
    return found


def _random_state(value: Any) -> int | None:
    """A checksum of the state of a random generator; None: it is none."""
    if isinstance(value, torch.Generator):
        state = value.get_state()  # a variable, because content() reads the memory of the tensor
        return zlib.crc32(content(state)) if value.device.type == "cpu" else None
    if type(value) is random.Random:
        return zlib.crc32(repr(value.getstate()).encode())
    if any(kind.__module__ == "numpy.random._generator" for kind in type(value).__mro__):  # also that of Draws
        return zlib.crc32(repr(value.bit_generator.state).encode())
    return None


def _attributes(recorder: Recorder, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object of the program keeps: of a module the tensors that are no parameters, otherwise all attributes."""
    if isinstance(value, nn.Module):
        for path, layer in itertools.islice(value.named_modules(), LAYERS):
            if recorder.of_program(layer):
                own = {name: each for name, each in vars(layer).items() if isinstance(each, torch.Tensor)}
                own |= layer.named_buffers(recurse=False) if next(layer.parameters(), None) is None else ()
                inner = path.removeprefix("module.").removeprefix("module")  # of DistributedDataParallel
                yield from ((f"{inner}.{name}".removeprefix("."), each) for name, each in own.items())
    elif recorder.of_program(value):
        own = attributes(value)
        numbers = [name for name, each in own.items() if type(each) in (int, float)]
        names = [*(name for name in own if name not in numbers), *numbers]
        yield from ((name, own[name]) for name in names[:VARIABLES])


def _norm(value: Any) -> float | None:
    """A number, the norm of a tensor, or that of all tensors in a dictionary or a list."""
    if type(value) in (int, float):
        return float(value)
    tensors = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if not tensors or len(tensors) > VARIABLES or not all(map(_counts, tensors)):
        return None
    parts = [each.detach().view(-1)[:ELEMENTS].double().norm() for each in tensors]
    return float(torch.stack(parts).norm())


def _counts(value: Any) -> bool:
    plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and value.is_contiguous()
    return plain and value.device.type == "cpu" and not value.is_complex() and value.numel() > 0
