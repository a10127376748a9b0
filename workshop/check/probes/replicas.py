"""When the parameters and buffers of the models of a program change, and at which lines of it.

Only a second run of a program whose ranks hold different parameters installs this probe: it traces the program.
"""

import json
import os
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from workshop.check.evidence.trail import CHANGES
from workshop.check.probes.contents import attributes, sketches
from workshop.check.probes.probe import on
from workshop.check.probes.trails import FEW, Trails, shown

TENSOR = torch._C.TensorBase  # its functions are not those that other probes observe
MOST = 8  # models that are watched
PARAMETERS = 400  # of a model that is watched
LARGEST = 100_000  # elements of a tensor whose norm is noted


def _models(variables: dict[str, Any]) -> Iterator[nn.Module]:
    """Yield the models in the variables of a function and in the attributes of its object, unless this object is a model."""
    owner = variables.get("self")
    more = {} if isinstance(owner, nn.Module) else attributes(owner)
    for name, value in [*variables.items(), *more.items()]:
        if isinstance(value, nn.Module) and name != "self":  # it may be incomplete
            yield value


class Watched:
    """A model whose parameters are watched."""

    def __init__(self, number: int, model: nn.Module):
        self.number = number
        self.parameters = list(model.parameters())
        layers = [each for each in model.modules() if not isinstance(each, _NormBase)]
        self.buffers = [each for layer in layers for each in layer.buffers(recurse=False) if type(each) is torch.Tensor]
        small = min(self.parameters, key=torch.Tensor.numel)
        self.read = {id(each): each for each in (small, self.parameters[-1]) if each.numel() <= LARGEST}.values()
        self.last = self.version()

    def version(self) -> tuple[int, int, str]:
        """What changes if a parameter is changed in place, or gets other memory."""
        parts = [(each._version, each.data_ptr()) for each in (*self.parameters, *self.buffers)]
        # ``parameter.data.mul_(2)`` does not change the version of the parameter, so two parameters are read.
        sums = [TENSOR.tolist(TENSOR.sum(TENSOR.detach(each))) for each in self.read]
        return sum(number for number, _ in parts), hash(tuple(place for _, place in parts)), str(sums)  # "nan" is equal


class Replicas(Trails):
    """Notes changes of the parameters of models, the uses of these models, and the norms of tensors beside the lines."""

    def _begin(self) -> None:
        self.watched: list[Watched] = []
        self.made = 0  # number of models that were watched so far
        self.known: set[int] = set()  # ids of the parameters of these models, and of models that are not watched
        self.lines_before: dict[int, int] = {}  # the last line of each running function
        self.changes = os.open(
            self.recorder.folder / f"{CHANGES}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        super()._begin()

    def _look(self, frame: FrameType, event: str) -> None:
        """Note which models the line that has just run has made or changed."""
        for watched in self.watched:
            if watched.last != (version := watched.version()):
                watched.last = version
                self._note("changed", watched, self._places(frame, event))
        for value in _models(frame.f_locals):
            if id(value) not in self.known:
                self._watch(value, self._places(frame, event))
        if event == "line":
            self.lines_before[id(frame)] = frame.f_lineno
        else:
            self.lines_before.pop(id(frame), None)

    def _watch(self, model: nn.Module, places: list[list[Any]]) -> None:
        """Watch a model, unless it is a part of one that is watched."""
        self.known.add(id(model))
        parameters = list(model.parameters())
        plain = all(type(each) in (nn.Parameter, torch.Tensor) and not each.is_inference() for each in parameters)
        own = set(map(id, parameters))
        if not self.known.issuperset(own) and plain and len(parameters) <= PARAMETERS and len(self.watched) < MOST:
            self.known |= own
            self.watched = [each for each in self.watched if not own.issuperset(map(id, each.parameters))]
            self.watched.append(Watched(self.made, model))
            self.made += 1
            self._note("changed", self.watched[-1], places)

    def _places(self, frame: FrameType | None, event: str) -> list[list[Any]]:
        """The lines of the program that led to the line that has just run, the innermost first, with those of its function."""
        found: list[list[Any]] = []
        line = frame.f_lineno if frame and event == "return" else self.lines_before.get(id(frame), 0)
        while frame:
            name = self.recorder.own(frame.f_code.co_filename)
            if name and line:
                of_code = [each for _, _, each in frame.f_code.co_lines() if each]
                found.append([f"{name}:{line}", min(of_code), max(of_code)])
            frame = frame.f_back
            line = frame.f_lineno if frame else 0
        return found

    def _note(self, what: str, watched: Watched, places: list[list[Any]]) -> None:
        said = {
            "what": what,
            "model": watched.number,
            "steps": self.recorder.steps,
            "number": self.count,
            "places": places,
            "sketches": sketches(watched.parameters),
            "buffers": sketches(watched.buffers),
        }
        os.write(self.changes, json.dumps(said).encode() + b"\n")

    @on("before_evaluation")
    def _evaluated(self, model: nn.Module) -> None:
        if self.tracing and (first := next(model.parameters(), None)) is not None:
            self._used(first)

    @on("before_step")
    def _steps(self, optimizer: Optimizer) -> None:
        if self.tracing:
            self._used(optimizer.param_groups[0]["params"][0])

    def _used(self, parameter: torch.Tensor) -> None:
        for watched in self.watched:
            if any(each is parameter for each in watched.parameters):
                frame = next(self.recorder.frames(), None)
                self._note("used", watched, self._places(frame, "return"))

    def _shown(self, value: object) -> str:
        text = shown(value)
        if type(value) in (torch.Tensor, nn.Parameter) and isinstance(value, torch.Tensor) and value.numel() > FEW:
            for each in sketches([value.detach().flatten()[:LARGEST]]):
                return f"{text} with norm {each[0]:.6g}" if each else text
        return text
