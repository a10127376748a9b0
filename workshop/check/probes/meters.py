"""Metrics of torchmetrics that evaluations compute without a reset between them."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from workshop.check.evidence.misuses import MetricKept
from workshop.check.probes.probe import Function, Probe, around, before


@dataclass
class _Meter:
    """A metric since its last reset."""

    steps: int | None = None  # of the optimizers until its value was computed; None: it was not
    updates: int = 0  # until then
    trains: bool = False  # it also gets values of the training
    told: bool = False


class Meters(Probe):
    """Records a metric that an evaluation computes again after further steps, with the samples of the one before."""

    writes = (MetricKept,)
    library = "torchmetrics"

    def clear(self) -> None:
        # By id: the hash of a metric depends on its state.
        self.meters: dict[int, _Meter] = {}
        self.inside = 0  # of forward(), which resets the metric to compute that of one batch

    @around(lambda torchmetrics: torchmetrics.Metric, "_wrap_update")
    def _updates(self, original: Function, metric: Any, update: Function) -> Function:
        self.meters[id(metric)] = meter = _Meter()
        wrapped = original(metric, update)

        @functools.wraps(wrapped)
        def noting(*args: Any, **kwargs: Any) -> Any:
            meter.trains = meter.trains or torch.is_grad_enabled()
            return wrapped(*args, **kwargs)

        return noting

    @around(lambda torchmetrics: torchmetrics.Metric, "_wrap_compute")
    def _computes(self, original: Function, metric: Any, compute: Function) -> Function:
        wrapped = original(metric, compute)

        @functools.wraps(wrapped)
        def noting(*args: Any, **kwargs: Any) -> Any:
            with self.recorder.guard:
                self._compute(metric)
            return wrapped(*args, **kwargs)

        return noting

    @around(lambda torchmetrics: torchmetrics.Metric, "forward")
    def _forward(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        if meter := self.meters.get(id(args[0])):
            meter.trains = meter.trains or torch.is_grad_enabled()
        self.inside += 1
        try:
            return original(*args, **kwargs)
        finally:
            self.inside -= 1

    @before(lambda torchmetrics: torchmetrics.Metric, "reset")
    def _reset(self, metric: Any) -> None:
        if not self.inside and (meter := self.meters.get(id(metric))):
            meter.steps = None

    def _compute(self, metric: Any) -> None:
        meter, steps = self.meters.get(id(metric)), self.recorder.steps
        if meter is None or self.inside or meter.trains or self.recorder.quiet:
            return
        updates = metric.update_count
        if meter.steps is not None and meter.steps < steps and updates > meter.updates > 0 and not meter.told:
            meter.told = True
            self.note_here(MetricKept(metric=type(metric).__name__, before=meter.updates, updates=updates))
        if meter.steps is None or meter.steps < steps:
            meter.steps, meter.updates = steps, updates
