"""Forward and backward passes: the samples that the model sees, those that it is trained on, and the loss."""

import zlib
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from workshop.check.evidence.events import Backward, Evaluated, Forward, UnevenJoined, Wrapped
from workshop.check.probes.contents import first_tensor, is_zero, mean, rows
from workshop.check.probes.probe import Function, Probe, after, around, before, on


class Models(Probe):
    """Records calls of whole models and of ``backward``, and the use of DDP and ``Join``."""

    writes = (Wrapped, UnevenJoined, Backward, Evaluated)
    depth = 0  # of nested module calls
    optimizer: Optimizer | None = None  # the last one that was created

    def clear(self) -> None:
        self.untrained: list[Forward] = []  # forward passes without a backward pass so far

    @around(nn.Module, "__call__")
    def _call(self, original: Function, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder.quiet or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        outermost = self.depth == 0
        if outermost:
            with recorder.guard:
                self._forward(module, first_tensor([*args, *kwargs.values()]))
        self.depth += 1
        try:
            with ExitStack() as stack:
                for context in recorder.around_forward if outermost else ():
                    stack.enter_context(context())
                output = original(module, *args, **kwargs)
        finally:
            self.depth -= 1
        recorder.call(recorder.after_module, module, output)
        return output

    def _forward(self, module: Any, tensor: torch.Tensor | None) -> None:
        if next(module.parameters(), None) is None:
            return
        wrapped = isinstance(module, DistributedDataParallel)
        model: nn.Module = module.module if wrapped else module
        if self.recorder.model is not model:
            self.recorder.model = model
            self.recorder.names.update({id(parameter): name for name, parameter in model.named_parameters()})
        batch = None if tensor is None else self.recorder.take_batch(tensor)
        content = [] if tensor is None else rows(tensor)
        forward = Forward(
            wrapped=wrapped,
            sync=bool(module.require_backward_grad_sync) if wrapped else None,
            keys=batch.keys if batch and tensor is not None and len(batch.keys) == len(tensor) else content,
            rows=content,
            shape=None if tensor is None else tuple(tensor.shape[1:]),
            loader=batch.loader if batch else None,
            where=self.recorder.where(),
        )
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
            self.untrained.append(forward)  # training, if a backward pass follows
        else:
            self.recorder.note(Evaluated(forward=forward, where=forward.where))

    @on("at_end")
    def _flush(self) -> None:
        """Record forward passes with gradients but without a backward pass as evaluations."""
        for forward in self.untrained:
            self.recorder.note(Evaluated(forward=forward, where=forward.where))
        self.untrained.clear()

    @around(DistributedDataParallel, "__init__")
    def _wrap(self, original: Function, ddp: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.note_here(Wrapped())
        # The GPU that the program chose is hidden from it, and on the CPU device_ids and output_device must be None.
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            args = (None, None, *args[2:])[: len(args)]
            kwargs |= dict.fromkeys(kwargs.keys() & {"device_ids", "output_device"})
        with self.recorder.quietly():
            original(ddp, module, *args, **kwargs)

    @before(Join, "__enter__")
    def _join(self, join: Join) -> None:
        self.recorder.note(UnevenJoined())

    @after(Optimizer, "__init__")
    def _remember(self, result: None, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.optimizer = optimizer

    @around(torch.Tensor, "backward")
    @around(torch.autograd, "backward")
    def _run_backward(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder.quiet:
            return original(*args, **kwargs)
        with recorder.guard:
            loss = args[0] if args else kwargs.get("tensors")
            self._backward(loss if isinstance(loss, torch.Tensor) else first_tensor(loss))
        recorder.in_backward = True
        try:
            with recorder.quietly():
                return original(*args, **kwargs)
        finally:
            recorder.in_backward = False

    def _backward(self, loss: torch.Tensor | None) -> None:
        forward = self.untrained.pop() if self.untrained else None
        self._flush()
        groups = self.optimizer.param_groups if self.optimizer else []
        ends = [parameter for group in groups for parameter in (*group["params"][:1], *group["params"][-1:])]
        left = any(not is_zero(parameter.grad) for parameter in ends)
        random = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        sync = forward.sync if forward else None
        self.note_here(Backward(forward=forward, loss=mean(loss), sync=sync, leftover=left, random=random))
