"""Forward and backward passes: which samples the model sees, which of them it is trained on, and with which loss."""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from workshop.check.evidence.events import Backward, Evaluated, Forward, Wrapped
from workshop.check.probes.contents import first_tensor, is_zero, mean, rows
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe
from workshop.check.probes.recorder import Recorder


class Models(Probe):
    """Notes the calls of whole models and of ``backward``."""

    writes = (Wrapped, Backward, Evaluated)
    always = True

    def __init__(self, recorder: Recorder):
        super().__init__(recorder)
        self.depth = 0  # of nested module calls
        self.optimizer: Optimizer | None = None  # the last one that was made

    def clear(self) -> None:
        """Forget the forward passes that no backward pass has followed."""
        self.untrained: list[Forward] = []

    def install(self) -> None:
        """Replace ``Module.__call__``, ``backward`` and the constructors of DDP and of optimizers."""
        self.patches.wrap(nn.Module, "__call__", self._call)
        self.patches.wrap(DistributedDataParallel, "__init__", self._wrap)
        self.patches.wrap(Optimizer, "__init__", self._optimizer)
        for owner in (torch.Tensor, torch.autograd):
            self.patches.wrap(owner, "backward", self._run_backward)
        self.recorder.at_end.append(self._flush)

    def _call(self, original: Function) -> Function:
        recorder = self.recorder

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if recorder.quiet or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            outermost = self.depth == 0
            if outermost:
                with recorder.guard:
                    self._forward(module, args, kwargs)
            self.depth += 1
            try:
                if outermost and recorder.around_forward:
                    with self._around():
                        output = original(module, *args, **kwargs)
                else:
                    output = original(module, *args, **kwargs)
            finally:
                self.depth -= 1
            for after in recorder.after_module:
                with recorder.guard:
                    after(module, output)
            return output

        return __call__

    @contextmanager
    def _around(self) -> Iterator[None]:
        with ExitStack() as stack:
            for around in self.recorder.around_forward:
                stack.enter_context(around())
            yield

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if next(module.parameters(), None) is None:
            return
        wrapped = isinstance(module, DistributedDataParallel)
        model = module.module if isinstance(module, DistributedDataParallel) else module
        if self.recorder.model is not model:
            self.recorder.model = model
            self.recorder.names.update({id(parameter): name for name, parameter in model.named_parameters()})
        tensor = first_tensor([*args, *kwargs.values()])
        batch = None if tensor is None else self.recorder.take_batch(tensor)
        content = [] if tensor is None else rows(tensor)
        same = batch is not None and tensor is not None and len(batch.keys) == len(tensor)
        forward = Forward(
            wrapped=wrapped,
            sync=bool(module.require_backward_grad_sync) if wrapped else None,
            keys=batch.keys if batch and same else content,
            rows=content,
            shape=None if tensor is None else tuple(tensor.shape[1:]),
            loader=batch.loader if batch else None,
            where=self.recorder.where(),
        )
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
            self.untrained.append(forward)  # for training, if a backward pass follows
        else:
            self.recorder.note(Evaluated(forward=forward, where=forward.where))

    def _flush(self) -> None:
        """Forward passes with gradients that no backward pass has followed were evaluations."""
        for forward in self.untrained:
            self.recorder.note(Evaluated(forward=forward, where=forward.where))
        self.untrained.clear()

    def _wrap(self, original: Function) -> Function:
        recorder = self.recorder

        def __init__(
            self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            with recorder.guard:
                recorder.note(Wrapped(where=recorder.where()))
            # The device that the program meant is hidden from it: on the CPU both have to be None.
            if all(parameter.device.type == "cpu" for parameter in module.parameters()):
                device_ids = output_device = None
            recorder.quiet += 1
            try:
                original(self, module, device_ids, output_device, *args, **kwargs)
            finally:
                recorder.quiet -= 1

        return __init__

    def _optimizer(self, original: Function) -> Function:
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self.optimizer = optimizer

        return __init__

    def _run_backward(self, original: Function) -> Function:
        recorder = self.recorder

        def backward(*args: Any, **kwargs: Any) -> Any:
            if recorder.quiet:
                return original(*args, **kwargs)
            with recorder.guard:
                loss = args[0] if args else kwargs.get("tensors")
                self._backward(loss if isinstance(loss, torch.Tensor) else first_tensor(loss))
            recorder.quiet, recorder.in_backward = recorder.quiet + 1, True
            try:
                return original(*args, **kwargs)
            finally:
                recorder.quiet, recorder.in_backward = recorder.quiet - 1, False

        return backward

    def _backward(self, loss: torch.Tensor | None) -> None:
        forward = self.untrained.pop() if self.untrained else None
        self._flush()
        leftover = any(
            not is_zero(parameter.grad)
            for group in (self.optimizer.param_groups if self.optimizer else ())
            for parameter in (*group["params"][:1], *group["params"][-1:])
        )
        self.recorder.note(
            Backward(
                forward=forward,
                loss=mean(loss),
                sync=forward.sync if forward else None,
                leftover=leftover,
                random=zlib.crc32(torch.get_rng_state().numpy().tobytes()),
                where=self.recorder.where(),
            )
        )
