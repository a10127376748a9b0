"""The cross entropy that the loss is made of, and over how many targets it is the mean."""

from typing import Any

import torch
from torch.nn import functional as F

from workshop.check.evidence.events import LossComputed
from workshop.check.probes.probe import Probe, after


class Losses(Probe):
    """Records each ``cross_entropy`` with gradients; targets with the value ``ignore_index`` do not count."""

    writes = (LossComputed,)

    @after(F, "cross_entropy")
    def _cross_entropy(
        self,
        result: torch.Tensor,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if not result.requires_grad or weight is not None or target.is_floating_point() or reduction == "none":
            return
        targets = int((target != ignore_index).sum())
        if targets:
            value, summed = float(result.detach()), reduction != "mean"
            self.note_here(LossComputed(targets=targets, mean=value / targets if summed else value, summed=summed))
