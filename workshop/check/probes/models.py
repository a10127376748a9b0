"""Forward and backward passes: the samples that the model sees, those that it is trained on, and the loss."""

import dataclasses
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from workshop.check.evidence.events import (
    A_NUMBER,
    Backward,
    BuffersSeen,
    Evaluated,
    Forward,
    ModelEvaluated,
    UnevenJoined,
    Wrapped,
)
from workshop.check.evidence.misuses import BuffersKept, BuffersReplaced, GradientsIgnored
from workshop.check.probes.contents import (
    attributes,
    chosen_rows,
    content,
    first_tensor,
    floats,
    is_fsdp1,
    is_sharded,
    is_synchronized,
    is_zero,
    mean,
    mixed,
    rows,
    sketches,
)
from workshop.check.probes.probe import Function, Probe, after, around, before, on

LAYERS = 32  # of a forward pass whose outputs are looked for behind a loss
WEIGHED = 4  # evaluations of a model whose parameters are recorded; later ones each time that the steps have doubled
BUFFERS = 4  # forward passes before which buffers are recorded
IGNORED = "_ddp_params_and_buffers_to_ignore"  # the attribute of a module that DistributedDataParallel reads
# Libraries that call a model to print its layers, or to count its operations.
MEASURING = ("torchinfo", "torchsummary", "torchsummaryX", "thop", "fvcore", "ptflops", "calflops", "torchview")
NODES = 20_000  # of an autograd graph


@dataclass(eq=False)
class Pending:
    """A forward pass that may be followed by a backward pass."""

    forward: Forward
    node: int | None  # the number of its output in the autograd graph (the node would keep its graph in memory)
    inner: list[int]  # those of the outputs of its layers, on which a loss can depend too, as one of derivatives does
    training: bool  # the model was in training mode
    steps: int  # that were taken before
    seconds: float = field(default_factory=time.monotonic)


class Models(Probe):
    """Records calls of whole models and of ``backward``, and the use of DDP and ``Join``."""

    writes = (
        Wrapped,
        GradientsIgnored,
        UnevenJoined,
        Backward,
        Evaluated,
        ModelEvaluated,
        BuffersSeen,
        BuffersKept,
        BuffersReplaced,
    )
    depth = 0  # of nested module calls
    unsynced = ""  # the line of the last ``no_sync()``
    passed = -1  # the number of steps before the last backward pass

    def clear(self) -> None:
        self.buffered = 0
        self.read: set[tuple[int, str]] | None = None  # modules and their buffers that were read; None: not watched
        self.inside: set[type] = set()  # the classes of the models inside DistributedDataParallel
        self.learn: set[type] = set()  # the classes of the models that are called with gradients
        self.scaling: WeakSet[nn.Module] = WeakSet()
        self.kept: WeakKeyDictionary[nn.Module, int] = (
            WeakKeyDictionary()
        )  # the steps after which buffers were recorded
        self.weighed: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()  # numbers of steps
        self.untrained: list[Pending] = []  # forward passes without a backward pass so far

    @around(nn.Module, "__call__")
    def _call(self, original: Function, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder.quiet or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        outermost, pending = self.depth == 0, None
        if outermost:
            with recorder.guard:
                given = [*args, *kwargs.values()]
                tensor = first_tensor(given)
                if tensor is None and recorder.opens_batches:
                    opened = [attributes(each) if recorder.of_program(each) else each for each in given]
                    numbers = [each.reshape(1) for each in given if isinstance(each, torch.Tensor) and not each.dim()]
                    tensor = first_tensor([opened, numbers])
                others = [each for each in floats(given) if each is not tensor] if recorder.opens_batches else ()
                pending = self._forward(module, tensor, others, given)
            recorder.call(recorder.before_forward, module, args, kwargs)
        self.depth += 1
        recorder.in_forward = True
        try:
            with ExitStack() as stack:
                for context in recorder.around_forward if outermost else ():
                    stack.enter_context(context())
                output = original(module, *args, **kwargs)
        finally:
            self.depth -= 1
            recorder.in_forward = self.depth > 0
        if (
            not outermost
            and self.untrained
            and len(self.untrained[-1].inner) < LAYERS
            and isinstance(output, torch.Tensor)
        ):
            self.untrained[-1].inner += [number for number in [_number(output)] if number is not None]
        if pending:
            with recorder.guard:
                plain = isinstance(output, (torch.Tensor, list, tuple, dict))
                tensor = first_tensor(output if plain else attributes(output))
                pending.node = _number(tensor)
        elif not outermost and vars(module).get("_buffers"):
            with recorder.guard:
                self._scales(module, args, output)
        recorder.call(recorder.after_module, module, output)
        return output

    def _scales(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Remember a layer that changes its input with its buffers only, such as a running mean and a running variance."""
        given = args[0] if args else None
        if module not in self.scaling and isinstance(given, torch.Tensor) and isinstance(output, torch.Tensor):
            alone = next(module.parameters(), None) is None and not isinstance(module, _NormBase)
            if alone and given.shape == output.shape and output.is_floating_point():
                self.scaling.add(module)

    def _forward(
        self,
        module: Any,
        tensor: torch.Tensor | None,
        others: Sequence[torch.Tensor] = (),
        given: Sequence[object] = (),
    ) -> Pending | None:
        """Record a forward pass as an evaluation; return it if a backward pass may follow (in Lightning inside the call)."""
        if next(module.parameters(), None) is None:
            self._loss_buffers(module)
            return None
        if torch.jit.is_tracing() or self._measured():  # for a picture of the model, for example
            return None
        ddp: Any = module._modules.get("_forward_module", module)  # of Lightning Fabric
        wrapped = isinstance(ddp, DistributedDataParallel)
        model: nn.Module = ddp.module if wrapped else module
        if self.recorder.model is not model:
            self.recorder.model = model
            self.recorder.names.update({id(parameter): name for name, parameter in model.named_parameters()})
        passes = (
            tensor is not None and tensor.requires_grad
        )  # also a frozen discriminator passes gradients on to its input
        batch = None if tensor is None else self.recorder.take_batch(tensor)
        number = tensor is not None and tensor.dim() == 1 and not tensor.is_floating_point()
        # A model that gets all nodes of a graph each time learns from those whose numbers it also gets.
        content = [] if tensor is None else rows(tensor if batch else chosen_rows(tensor, given))
        if number:  # one number, such as that of a user, is no sample
            content = [(A_NUMBER, *each) for each in content] if self.recorder.opens_batches else []
        if self.recorder.opens_batches and batch is None:  # no loader says which samples these are
            content = [*content, *(row for each in others for row in rows(each))]
        forward = Forward(
            wrapped=wrapped,
            sync=bool(ddp.require_backward_grad_sync) if wrapped else None,
            # Numbers of users, for example, say nothing about the samples, and may be repeated for others: the batch counts.
            keys=batch.keys
            if batch and tensor is not None and (len(batch.keys) == len(tensor) or not content)
            else content,
            rows=content,
            shape=None if tensor is None else tuple(tensor.shape[1:]),
            loader=batch.loader if batch else None,
            follows=passes,
            # A part of a model that is called by a method of the model: the line that calls the method.
            where=(not wrapped and self.recorder.where(*self.inside)) or self.recorder.where(),
        )
        passes = passes or any(each.requires_grad for each in model.parameters())
        if torch.is_grad_enabled() and passes:
            self._buffers(model, forward.where, ddp if wrapped else None)
            self.learn.add(type(model))
            self.untrained.append(Pending(forward, None, [], module.training, self.recorder.steps))
            return self.untrained[-1]
        self.recorder.call(self.recorder.before_evaluation, model)
        self._weigh(model, forward.where)
        if self._serves(model):
            return None
        if any(map(_refreshes, model.modules())):
            forward = dataclasses.replace(forward, refreshes=True)
        self.recorder.note(Evaluated(forward=forward, where=forward.where))
        return None

    def _serves(self, model: nn.Module) -> bool:
        """Whether a model is frozen and no copy of a trained one, such as an encoder of texts or a network of a metric."""
        return not any(each.requires_grad for each in model.parameters()) and self.learn.isdisjoint(
            map(type, model.modules())
        )

    def _measured(self) -> bool:
        """Whether a library calls the model only to describe it, with an input that it makes up."""
        frame: FrameType | None = sys._getframe(2)
        while frame and not self.recorder.own(frame.f_code.co_filename):
            if frame.f_globals.get("__name__", "").partition(".")[0] in MEASURING:
                return True
            frame = frame.f_back
        return False

    def _buffers(self, model: nn.Module, where: str, wrapper: DistributedDataParallel | None) -> None:
        """Record the buffers of a model. Without DistributedDataParallel, only those that change the inputs of the model."""
        kept = wrapper is not None and not wrapper.broadcast_buffers
        again = (
            kept and self.recorder.steps.bit_count() == 1
        )  # after 1, 2, 4, 8 ... steps: they may begin to differ late
        sent = wrapper is not None and wrapper.will_sync_module_buffers()
        if kept and self.read is None:
            self._watch_reading()
        if not self.recorder.steps or not (self.buffered < BUFFERS or again) or not (kept or sent or wrapper is None):
            return
        chosen = {
            name
            for name, each in model.named_modules()
            if (not isinstance(each, _NormBase) if wrapper else each in self.scaling)
        }
        buffers = {name: each for name, each in model.named_buffers() if name.rpartition(".")[0] in chosen}
        if kept and self.read is not None:  # noise for an option that is not used changes nothing
            owners = dict(model.named_modules())
            read = {
                name for name in buffers if (id(owners[name.rpartition(".")[0]]), name.rpartition(".")[2]) in self.read
            }
            buffers = {name: buffers[name] for name in buffers if name in read}
        self.buffered += wrapper is not None or bool(buffers)
        if buffers:
            values, names = [mixed(each) for each in buffers.values()], list(buffers)
            seen = BuffersSeen(buffers=values, names=names, where=where)
            self.recorder.note(BuffersKept(buffers=values, names=names, where=where) if kept else seen)

    def _watch_reading(self) -> None:
        """From now on, remember which buffers are read as attributes of their modules."""
        read: set[tuple[int, str]] = set()
        self.read = read
        original = nn.Module.__getattr__

        def __getattr__(module: nn.Module, name: str) -> Any:
            value = original(module, name)
            if isinstance(value, torch.Tensor) and name in vars(module).get("_buffers", ()):
                read.add((id(module), name))
            return value

        self.patches.set(nn.Module, "__getattr__", __getattr__)

    def _loss_buffers(self, module: nn.Module) -> None:
        """Record the buffers of a module without parameters, such as a loss with a running mean, after 0, 1, 2, 4 ... steps."""
        steps = self.recorder.steps
        if not torch.is_grad_enabled() or steps.bit_count() > 1 or self.kept.get(module) == steps:
            return
        self.kept[module] = steps
        owners = dict(module.named_modules())
        named = ((name, each) for name, each in module.named_buffers() if not _of_norm(owners, name))
        if buffers := dict(named):
            names = [f"{type(module).__name__}.{name}" for name in buffers]
            self.note_here(BuffersKept(buffers=[mixed(each) for each in buffers.values()], names=names))

    def _weigh(self, model: nn.Module, where: str) -> None:
        """Record the parameters of a model that is evaluated, some times, but once between two steps."""
        times = self.weighed.setdefault(model, [])
        if (
            (len(times) >= WEIGHED and self.recorder.steps < 2 * times[-1])
            or self.recorder.steps in times
            or is_fsdp1(model)
            or any(map(is_sharded, model.parameters()))
        ):
            return
        times.append(self.recorder.steps)
        parameters = dict(model.named_parameters())
        weights = sketches(parameters.values())
        kind, names = type(model).__name__, list(parameters)
        self.recorder.note(ModelEvaluated(model=kind, weights=weights, names=names, steps=times[-1], where=where))

    @on("at_end")
    def _flush(self) -> None:
        """Record forward passes with gradients but without a backward pass as evaluations."""
        for pending in self.untrained:
            self.recorder.note(Evaluated(forward=pending.forward, where=pending.forward.where), pending.seconds)
        self.untrained.clear()

    @around(DistributedDataParallel, "__init__")
    def _wrap(self, original: Function, ddp: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        with self.recorder.guard:
            names = [name for name, each in module.named_parameters() if each.requires_grad]
            self.note_here(Wrapped(names=tuple(names)))
            self.recorder.wrap()
            owners = dict(module.named_modules())
            buffers = {name: each for name, each in module.named_buffers() if not _of_norm(owners, name)}
            if buffers and kwargs.get("broadcast_buffers", True):
                weights, values = sketches(module.parameters()), sketches(buffers.values())
                self.note_here(BuffersReplaced(weights=weights, buffers=values, names=list(buffers)))
            self.inside.add(type(module))
            if ignored := set(names).intersection(getattr(module, IGNORED, ())):
                self.note_here(GradientsIgnored(names=sorted(ignored)))
        with self.recorder.quietly():
            original(ddp, module, *args, **kwargs)

    @before(DistributedDataParallel, "no_sync")
    def _no_sync(self, ddp: Any) -> None:
        self.unsynced = self.recorder.where()

    @before(Join, "__enter__")
    def _join(self, join: Join) -> None:
        self.recorder.note(UnevenJoined())

    @after(Optimizer, "__init__")
    def _remember(self, result: None, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.recorder.optimizers[optimizer] = self.recorder.where()

    @around(torch.Tensor, "backward")
    @around(torch.autograd, "backward")
    def _run_backward(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder.quiet:
            return original(*args, **kwargs)
        with recorder.guard:
            given = args[0] if args else kwargs.get("tensors")
            loss = given if isinstance(given, torch.Tensor) else first_tensor(given)
            self._backward(loss)
            recorder.call(recorder.before_backward, loss)
        recorder.in_backward = True
        try:
            with recorder.quietly():
                result = original(*args, **kwargs)
        finally:
            recorder.in_backward = False
        recorder.call(recorder.after_backward)
        return result

    def _backward(self, loss: torch.Tensor | None) -> None:
        behind = reached(loss, {each.node for each in self.untrained if each.node is not None})
        if any(each.node not in behind for each in self.untrained):
            behind |= reached(loss, {number for each in self.untrained for number in each.inner})
        used = [each for each in self.untrained if not behind.isdisjoint((each.node, *each.inner))] or self.untrained[
            -1:
        ]
        # The images of a generator wait for its own backward pass, after that of the discriminator and its step.
        steps = self.recorder.steps
        waiting = [each for each in self.untrained if each not in used and each.training and steps < each.steps + 2]
        self.untrained = [each for each in self.untrained if each not in used and each not in waiting]
        self._flush()
        self.untrained = waiting
        passes = [each.forward for each in used]
        forward = next((each for each in reversed(passes) if each.loader), passes[-1] if passes else None)
        others = [each for each in passes if each is not forward]
        left = [_has_gradients(optimizer) for optimizer in self.recorder.optimizers]
        if any(map(_has_buffers, self.recorder.optimizers)):
            left = [self.passed == self.recorder.steps]
        self.passed = self.recorder.steps
        state = torch.get_rng_state()
        random = zlib.crc32(content(state))
        sync = forward.sync if forward else None
        value, scale = mean(loss), self.recorder.unscaled(loss)
        event = Backward(
            forward=forward,
            others=others,
            loss=None if value is None else value / scale,
            sync=sync,
            leftover=bool(left) and all(left),
            random=random,
            unsynced=self.unsynced,
        )
        self.note_here(event)


def _has_gradients(optimizer: Optimizer) -> bool:
    """Whether the first or last parameters of an optimizer have gradients that a backward pass adds to."""
    ends = [each for group in optimizer.param_groups for each in (*group["params"][:1], *group["params"][-1:])]
    return any(not is_zero(parameter.grad) for parameter in ends)


def _has_buffers(optimizer: Optimizer) -> bool:
    """Whether a hook adds the gradients to buffers of the program, as in Megatron, and removes them from the parameters."""
    return any(hasattr(parameter, "main_grad") for group in optimizer.param_groups for parameter in group["params"][:1])


def _refreshes(layer: nn.Module) -> bool:
    """Whether a forward pass changes the statistics of a layer by those of the samples of this process."""
    if not isinstance(layer, _NormBase) or is_synchronized(layer):
        return False
    return bool(layer.training and layer.track_running_stats)


def _of_norm(modules: dict[str, nn.Module], buffer: str) -> bool:
    """Whether a buffer is that of a BatchNorm."""
    return isinstance(modules[buffer.rpartition(".")[0]], _NormBase)


def _number(output: torch.Tensor | None) -> int | None:
    """The number of the node of an output in the autograd graph; no two nodes of a thread have the same one."""
    node: Any = None if output is None else output.grad_fn
    return None if node is None else int(node._sequence_nr())


def reached(loss: torch.Tensor | None, wanted: set[int]) -> set[int]:
    """Return those of these nodes of the autograd graph that the loss depends on; looks at NODES nodes at most."""
    seen: set[Any] = set()
    found: set[int] = set()
    pending: list[Any] = [loss.grad_fn] if loss is not None else []
    while pending and found != wanted and len(seen) < NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (number := node._sequence_nr()) in wanted:
            found.add(number)
        pending.extend(following for following, _ in node.next_functions)
    return found
