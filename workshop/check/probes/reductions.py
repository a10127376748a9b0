"""What reductions return, and from which of them a program makes the gradients of a step.

Only a second run of a program that reduces the gradients of several backward passes of a step by hand installs this probe.
"""

import json
import os
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.optim import Optimizer

from workshop.check.evidence.reductions import FILE
from workshop.check.probes.contents import first_tensor, is_zero, sketches
from workshop.check.probes.probe import Probe, after, on

MOST = 4000  # reductions that are noted


class Reductions(Probe):
    """Notes the results of reductions, whether backward passes find earlier gradients, and the gradients of steps."""

    def clear(self) -> None:
        self.count = 0

    def _note(self, what: str, left: bool, tensors: list[torch.Tensor | None]) -> None:
        self.count += 1
        if self.count <= MOST:
            said = [what, self.recorder.where(), left, sketches(tensors)]
            file = os.open(self.recorder.folder / f"{FILE}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(file, json.dumps(said).encode() + b"\n")
            os.close(file)

    @after(c10d, "all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce")
    def _reduced(self, result: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> None:
        tensor = first_tensor([*args[:1], *kwargs.values()])
        if tensor is not None and not async_op and not self.recorder.quiet:
            self._note("reduced", False, [tensor])

    @on("before_backward")
    def _backward(self, loss: torch.Tensor | None) -> None:
        parameters = self.recorder.model.parameters() if self.recorder.model else ()
        self._note("backward", any(not is_zero(each.grad) for each in parameters), [])

    @on("before_step")
    def _step(self, optimizer: Optimizer) -> None:
        self._note("step", False, [each.grad for group in optimizer.param_groups for each in group["params"]])
