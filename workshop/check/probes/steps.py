"""Optimizer steps: gradients, parameters and learning rates before each step, parameters after it; gradient clipping."""

import gc
import itertools
import time
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from workshop.check.evidence.events import (
    GradientsClipped,
    GraphMeasured,
    StateLoaded,
    StepBegun,
    StepTaken,
    VariablesSeen,
)
from workshop.check.evidence.misuses import ClipLimit, MemoryShared, NormsSeen, OthersSeen
from workshop.check.probes.contents import is_fsdp1, is_sharded, is_zero, sketches
from workshop.check.probes.probe import Function, Probe, around, before, on
from workshop.check.probes.variables import norms, variables
from workshop.tensors import is_dtensor

LARGEST = 3000  # count at most this number of nodes
NORMS = 6  # steps before which norms are looked for
SAVES = 8  # saved files after which these tensors are recorded
OTHERS = 200  # tensors of a model beside its trained parameters that are recorded


class Steps(Probe):
    """Records the steps of all optimizers."""

    writes = (StepBegun, StepTaken, GraphMeasured, NormsSeen, OthersSeen, MemoryShared, VariablesSeen, StateLoaded)

    def clear(self) -> None:
        self.begun = False
        self.saved = 0  # files that were saved when other tensors were recorded last
        self.normed = 0  # steps before which norms were found
        self.learned = False  # whether a backward pass has run
        self.prepared: WeakSet[Optimizer] = WeakSet()  # optimizers that took a step before it

    @on("after_backward")
    def _learn(self) -> None:
        self.learned = True

    @on("before_forward")
    def _open(self, *_: Any) -> None:
        """Record the variables also before the first forward pass, in which some may change, and others after a save."""
        if torch.is_grad_enabled() and (not self.begun or self.saved < self.recorder.saved <= SAVES):
            self.saved = self.recorder.saved
            self._others()
            if not self.begun:
                self.begun = True
                self.recorder.note(variables(self.recorder))

    def _others(self) -> None:
        """Record the tensors of the model that no optimizer has."""
        held = {id(each) for optimizer in self.recorder.optimizers for each in _parameters(optimizer)}
        model = self.recorder.model
        named = (
            itertools.chain(model.named_parameters(), model.named_buffers()) if model and not is_fsdp1(model) else ()
        )
        others = {name: each for name, each in named if id(each) not in held and _plain(each)}
        if others and len(others) <= OTHERS:
            self.recorder.note(OthersSeen(names=list(others), values=sketches(others.values())))

    def install(self) -> None:
        super().install()
        self.patches.callback(register_optimizer_step_pre_hook(self._before).remove)
        self.patches.callback(register_optimizer_step_post_hook(self._after).remove)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._begin(optimizer)
            return None

        # (With Lightning and LBFGS, the closure computes the gradients inside the step.)
        def noting() -> Any:
            result = closure()
            self._begin(optimizer)
            return result

        return (args[0], noting), {name: value for name, value in kwargs.items() if name != "closure"}

    def _begin(self, optimizer: Optimizer) -> None:
        recorder = self.recorder
        if recorder.steps == 0:
            recorder.first_step = time.process_time()
        recorder.at_step()
        recorder.call(recorder.before_step, optimizer)
        with recorder.guard:
            recorder.note(variables(recorder))
            if self.normed < NORMS and (found := norms(recorder)):
                self.normed += 1
                recorder.note(NormsSeen(norms=found))
        with recorder.guard:
            parameters, model = _parameters(optimizer), recorder.model
            own = {id(parameter) for parameter in parameters}
            begun = StepBegun(
                gradients=sketches(parameter.grad for parameter in parameters),
                weights=sketches(parameters),
                names=[recorder.names.get(id(parameter), "") for parameter in parameters],
                rates=[float(group.get("lr", 0)) for group in optimizer.param_groups],
                state=len(optimizer.state),
                of_model=model is None or not own.isdisjoint(recorder.names),
                fitting=recorder.fitting,
                sharded=recorder.sharded or any(map(is_sharded, parameters)) or is_fsdp1(model),
                forgotten=self._forgotten() if recorder.steps == 1 else [],
                made=recorder.optimizers.get(optimizer, ""),
            )
            self.note_here(begun)
            if begun.sharded:
                recorder.wrap()
            if (
                not recorder.steps
                and parameters
                and all(each.device.type == "cpu" and each.is_shared() for each in parameters)
            ):
                recorder.note(MemoryShared())
            if recorder.steps in (2, 4, 6):  # three steps, to see whether the graph grows
                recorder.note(GraphMeasured(nodes=largest_graph()))

    def _forgotten(self) -> list[str]:
        """The names of parameters that have a gradient, and that no optimizer has; others were in their place before.

        An optimizer that only has some parameters of the model is no mistake: it trains a head, for example.
        """
        held = {id(each) for optimizer in self.recorder.optimizers for each in _parameters(optimizer)}
        if held.issubset(self.recorder.names):
            return []
        named = self.recorder.model.named_parameters() if self.recorder.model else ()
        return [name for name, each in named if each.requires_grad and id(each) not in held and not is_zero(each.grad)]

    @before(Optimizer, "load_state_dict")
    def _load(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.note_here(StateLoaded())

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # To load a checkpoint, torch.distributed.checkpoint takes a step that only creates the state of the optimizer.
        self.recorder.steps += self.learned or optimizer in self.prepared
        if not self.learned:
            self.prepared.add(optimizer)
        with self.recorder.guard:
            self.recorder.note(StepTaken(weights=sketches(_parameters(optimizer))))
        self.recorder.call(self.recorder.after_step, optimizer)


class Clipping(Probe):
    """Records how gradients are clipped, with their norms in this process."""

    writes = (GradientsClipped, ClipLimit)

    def clear(self) -> None:
        self.limited = False  # whether the limit is recorded

    @around(nn.utils, "clip_grad_norm_")
    @around(nn.utils.clip_grad, "clip_grad_norm_")
    def _clip(self, original: Function, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norms = self._norms(parameters)
        with self.recorder.guard:
            if not self.limited:
                self.limited = True
                self.note_here(ClipLimit(limit=float(args[0] if args else kwargs["max_norm"])))
        total = original(parameters, *args, **kwargs)
        self._clipped(norms, total)
        return total

    @around(nn.utils, "clip_grads_with_norm_")
    def _clip_with(
        self, original: Function, parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._clipped(self._norms(parameters), total_norm)
        return original(parameters, max_norm, total_norm, *args, **kwargs)

    def _norms(self, parameters: list[torch.Tensor]) -> list[float]:
        with self.recorder.guard:
            return [sketch[0] for sketch in sketches(each.grad for each in parameters) if sketch]
        return []

    def _clipped(self, norms: list[float], total: torch.Tensor) -> None:
        with self.recorder.guard:
            (whole,) = [None] if is_dtensor(total) else sketches([total])
            self.note_here(GradientsClipped(norms=norms, total=whole and whole[0]))


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_floating_point() and not tensor.is_meta


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def largest_graph() -> int:
    """Return the number of nodes of the largest autograd graph in memory, up to ``LARGEST``."""
    largest = 0
    for value in gc.get_objects():
        if type(value) is not torch.Tensor:
            continue
        try:
            open_nodes = [value.grad_fn]
        except RuntimeError:
            continue  # "undefined tensor", already cleared by the garbage collector; seen with DeepSpeed
        seen: set[Any] = set()
        while open_nodes and len(seen) < LARGEST:
            node = open_nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                open_nodes.extend(following for following, _ in node.next_functions)
        largest = max(largest, len(seen))
    return largest
