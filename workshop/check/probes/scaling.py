"""Automatic mixed precision: the steps that a GradScaler skips, and gradients that are clipped with its scale in them."""

from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from workshop.check.evidence.events import ScaledClipped, StepSkipped
from workshop.check.probes.probe import Function, Probe, after, around, before


class Scaling(Probe):
    """Records what a ``GradScaler`` does; one that is not enabled does nothing."""

    writes = (StepSkipped, ScaledClipped)

    def clear(self) -> None:
        self.scalers: WeakSet[Any] = WeakSet()
        self.loss: Any = lambda: None  # the last scaled loss
        self.scale = 1.0  # of this loss
        self.known = False  # the program has asked for the scale since then, so it may divide by it
        self.recorder.unscaled = lambda loss: self.scale if loss is not None and loss is self.loss() else 1.0

    @after(torch.amp.GradScaler, "scale")
    def _scale(self, scaled: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        if scaler.is_enabled() and isinstance(scaled, torch.Tensor):
            self.scalers.add(scaler)
            self.loss, self.scale, self.known = ref(scaled), _scale_of(scaler), False

    @before(torch.amp.GradScaler, "get_scale")
    def _ask(self, scaler: Any) -> None:
        self.known = True

    @around(torch.amp.GradScaler, "step")
    def _step(self, original: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        begun = self.recorder.steps
        result = original(scaler, *args, **kwargs)
        if scaler.is_enabled() and self.recorder.steps == begun:
            self.note_here(StepSkipped(scale=_scale_of(scaler)))
        return result

    @around(nn.utils, "clip_grad_norm_", "clip_grad_value_")
    @around(nn.utils.clip_grad, "clip_grad_norm_", "clip_grad_value_")
    def _clip(self, original: Function, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        with self.recorder.guard:
            self._before_clipping(given)
        return original(given, *args, **kwargs)

    def _before_clipping(self, given: list[torch.Tensor]) -> None:
        if not self.scalers or self.known or self.scale == 1:
            return
        first = next((each for each in given if each.grad is not None), None)
        for optimizer in self.recorder.optimizers:
            if any(each is first for group in optimizer.param_groups for each in group["params"]):
                states = [scaler._per_optimizer_states.get(id(optimizer)) for scaler in self.scalers]
                if not any(state and state["stage"] is OptState.UNSCALED for state in states):
                    self.note_here(ScaledClipped(scale=self.scale))
                return


def _scale_of(scaler: Any) -> float:
    """The scale, without a call that this probe observes."""
    return float(scaler._scale) if scaler._scale is not None else 1.0
