"""Automatic mixed precision: the steps that a GradScaler skips, and gradients that are clipped with its scale in them."""

from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from workshop.check.evidence.events import ScaledClipped, StepSkipped
from workshop.check.evidence.misuses import HalfUnscaled
from workshop.check.probes.probe import Function, Probe, after, around, before, on

HALVES = 2  # steps after forward passes in float16 that show how the program trains


class Scaling(Probe):
    """Records what a ``GradScaler`` does; one that is not enabled does nothing. Also records float16 without one."""

    writes = (StepSkipped, ScaledClipped, HalfUnscaled)

    def clear(self) -> None:
        self.scalers: WeakSet[Any] = WeakSet()
        self.loss: Any = lambda: None  # the last scaled loss
        self.scale = 1.0  # of this loss
        self.casts: WeakSet[Any] = WeakSet()  # autocast contexts with float16
        self.made = False  # whether the program has made a GradScaler, also one that this machine does not enable
        self.half = ""  # the line that entered autocast with float16 since the last step
        self.halves = 0  # steps after that
        self.known = False  # the program has asked for the scale since then, so it may divide by it
        self.recorder.unscaled = lambda loss: self.scale if loss is not None and loss is self.loss() else 1.0

    @before(torch.amp.GradScaler, "__init__")
    def _make(self, scaler: Any, *args: Any, **kwargs: Any) -> None:
        self.made = self.made or kwargs.get("enabled", True)

    @before(torch.amp.autocast_mode.autocast, "__init__")
    def _choose(
        self, context: Any, device_type: str, dtype: Any = None, enabled: bool = True, *more: Any, **kw: Any
    ) -> None:
        """Remember what computes in float16 on a GPU; without one, PyTorch turns it off."""
        if enabled and (dtype or (torch.float16 if device_type == "cuda" else None)) == torch.float16:
            self.casts.add(context)

    @before(torch.amp.autocast_mode.autocast, "__enter__")
    def _cast(self, context: Any) -> None:
        if context in self.casts and torch.is_grad_enabled() and not self.made:
            self.half = self.half or self.recorder.where()

    @on("after_step")
    def _count(self, optimizer: Any) -> None:
        self.halves += bool(self.half) and not self.made
        if self.half and self.halves == HALVES:
            self.recorder.note(HalfUnscaled(where=self.half))
        self.half = ""

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
