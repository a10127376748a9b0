"""Record what a rank holds, computes and communicates, operation by operation, in a step with fake tensors.

A fake tensor has a shape, a dtype and a storage with a size, but no values. So the storages that exist are the memory that the
step needs, without taking this memory.
"""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from workshop.tensors import own_part
from workshop.training.traffic import collective_of

# What a storage is for. The first three stay from step to step.
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, GATHERED, MESSAGES, TEMPORARY = "activations", "gathered", "messages", "temporary"
KINDS = (PARAMETERS, OPTIMIZER, GRADIENTS, ACTIVATIONS, GATHERED, MESSAGES, TEMPORARY)
FORWARD, BACKWARD, RECOMPUTE, UPDATE = "forward", "backward", "recompute", "optimizer"
PASSES = (FORWARD, BACKWARD, RECOMPUTE, UPDATE)


@dataclass(eq=False, slots=True)
class Storage:
    """Memory of tensors.

    Attributes:
        bytes: the size now; FSDP frees and allocates the memory of gathered parameters by resizing them.
        kind: one of ``KINDS``.
        module, doing: the module and the pass in which it was made.
    """

    bytes: int
    kind: str
    module: str
    doing: str


@dataclass(frozen=True)
class Call:
    """A collective: the operation at which it began, its kind, its group, the bytes of the whole tensor, and where."""

    position: int
    kind: str
    group: Any
    bytes: int
    module: str
    doing: str


class Recorder:
    """What a rank does in a step.

    Attributes:
        position: the number of operations so far.
        now, peak: bytes at this moment, and the most so far.
        peak_at: the operation, module and pass of the peak.
        log: for each change of the memory, the operation, the storage and the difference in bytes.
        passes: for each change of the pass, the operation and the new pass.
        kept: bytes of each kind at the end of the step.
        gradients: bytes of the gradients when the optimizer step begins.
        inside: whether an operation is running.
        calls: the collectives.
        flops: floating-point operations by module and pass.
    """

    def __init__(self):
        self._live: dict[int, tuple[weakref.ref, Storage]] = {}
        self._stack: list[tuple[str, bool]] = []  # of modules: the name, and whether the backward pass recomputes it
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        # The numbers of autograd's nodes grow. From the first number on, nodes belong to the module of the second list.
        self._numbers, self._owners = [0], [""]
        self._last = ""  # the module of the last node; nodes that accumulate gradients have no number
        self.updating = self.paused = self.inside = self._ended = False
        self.now = self.peak = self.gradients = 0
        self.kept: dict[str, int] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a step: forget everything except the storages that exist."""
        self.position, self.peak, self.peak_at = 0, self.now, (0, "", FORWARD)
        self.log = [(0, storage, storage.bytes) for _, storage in self._live.values()]
        self.passes: list[tuple[int, str]] = []
        self.calls: list[Call] = []
        self.flops: Counter[tuple[str, str]] = Counter()

    def end(self) -> None:
        """End the step: record nothing from now on."""
        self.kept = {kind: self._bytes_of(kind) for kind in KINDS}
        self.paused = self._ended = True

    def where(self) -> tuple[str, str]:
        """Return the module and the pass of the current operation. Outside of the modules (the loss), the module is ""."""
        if self.updating:
            return "", UPDATE
        inside = torch._C._current_graph_task_id() != -1
        if self._stack and self._stack[-1][1] == inside:
            return self._stack[-1][0], RECOMPUTE if inside else FORWARD
        if not inside:
            return "", FORWARD
        node = torch._C._current_autograd_node()
        if node is not None and (number := node._sequence_nr()) < 2**63:
            self._last = self._owners[bisect_right(self._numbers, number) - 1]
        return self._last, BACKWARD

    # Modules

    def enter(self, module: nn.Module) -> None:
        """Note that the forward pass of a module begins."""
        if module not in self._names:
            for name, each in module.named_modules():
                self._names.setdefault(each, short(name))
        self._stack.append((self._names[module], torch._C._current_graph_task_id() != -1))
        self._turn()

    def leave(self) -> None:
        """Note that the forward pass of the innermost module has ended."""
        self._stack.pop()
        self._turn()

    def _turn(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._owners.append(self._stack[-1][0] if self._stack else "")

    # Memory

    def add(self, tensor: torch.Tensor, kind: str = "") -> None:
        """Count the storage of a tensor, if it is not counted yet. With a ``kind``, its storage is of this kind from now on."""
        if kind:
            with torch.no_grad():
                tensor = own_part(tensor)
        if not isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._live:
            module, doing = self.where()
            made = Storage(0, ACTIVATIONS if doing == FORWARD else TEMPORARY, module, doing)
            self._live[key] = weakref.ref(storage, lambda _: self._change(self._live.pop(key)[1], 0)), made
            self._change(made, size)
        if kind:
            self._live[key][1].kind = kind

    def add_all(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        for tensor in tensors:
            self.add(tensor, kind)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage was resized, as FSDP does with gathered parameters."""
        if entry := self._live.get(storage._cdata):
            entry[1].kind = GATHERED
            self._change(entry[1], storage.nbytes())

    def _change(self, storage: Storage, size: int) -> None:
        by, storage.bytes = size - storage.bytes, size
        if self._ended:
            return
        self.now += by
        self.log.append((self.position, storage, by))
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, (self.position, *self.where())

    def _bytes_of(self, kind: str) -> int:
        """Return the bytes of the storages of a kind that exist now."""
        return sum(storage.bytes for _, storage in self._live.values() if storage.kind == kind)

    def begin_update(self) -> None:
        """Note that the optimizer step begins. The gradients are complete."""
        self.gradients, self.updating = self._bytes_of(GRADIENTS), True

    # Operations

    def saw(self, operation, args: tuple, kwargs: dict, result: Any) -> None:
        """Record an operation of PyTorch and its result."""
        if self.paused:
            return
        self.position += 1
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, FakeTensor):
                self.add(tensor)
            elif isinstance(tensor, list | tuple):  # some collectives return lists of tensors
                for each in tensor:
                    self.add(each)
        if operation.namespace in ("c10d", "_c10d_functional"):
            self._saw_collective(operation, args, result)
        elif formula := flop_registry.get(operation._overloadpacket):
            self.flops[self.where()] += formula(*args, **kwargs, out_val=result)
        elif self.position % 8:
            return  # the pass below need not be exact
        if (doing := self.where()[1]) != (self.passes[-1][1] if self.passes else ""):
            self.passes.append((self.position, doing))

    def _saw_collective(self, operation, args: tuple, result: Any) -> None:
        if not (found := collective_of(operation, args)):
            return
        self.calls.append(Call(self.position, *found, *self.where()))
        for each in (*args, result):
            for tensor in each if isinstance(each, list | tuple) else (each,):
                entry = isinstance(tensor, FakeTensor) and self._live.get(tensor.untyped_storage()._cdata)
                if entry and entry[1].kind in (ACTIVATIONS, TEMPORARY):
                    entry[1].kind = MESSAGES


class Watch(TorchDispatchMode):
    """Tell a recorder of each operation in a with-block that has to do with fake tensors.

    Args:
        recorder: to tell.
        value_of: returns the value for an operation that reads the value of a fake tensor, or raises the error that it gets.
    """

    def __init__(
        self, recorder: Recorder, value_of: Callable[[FakeTensor, DataDependentOutputException], float] | None = None
    ):
        super().__init__()
        self.recorder, self.value_of = recorder, value_of

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(each is not FakeTensor for each in types):
            return NotImplemented  # a DTensor: see the operations that it makes of this one
        if self.recorder.inside:  # an operation that is part of the current one
            return operation(*args, **(kwargs or {}))
        self.recorder.inside = True
        try:
            result = operation(*args, **(kwargs or {}))
        except DataDependentOutputException as error:
            if self.value_of is None or operation is not torch.ops.aten._local_scalar_dense.default:
                raise
            return self.value_of(args[0], error)
        finally:
            self.recorder.inside = False
        if operation.namespace == "c10d" or (operation.namespace != "prim" and (types or has_fake(result))):
            self.recorder.saw(operation, args, kwargs or {}, result)
        return result


def has_fake(result: Any) -> bool:
    """Return whether the result of an operation is a fake tensor, or a list that begins with one."""
    first = result[0] if isinstance(result, list | tuple) and result else result
    return isinstance(first, FakeTensor)


def observed(recorder: Recorder) -> AbstractContextManager:
    """Return a context in which the recorder also sees modules, optimizers, and storages that are resized."""
    stack = ExitStack()
    resize = torch.UntypedStorage.resize_

    def resize_(storage, size):
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    def before(optimizer, *_):
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        recorder.add_all((each.grad for each in held if each.grad is not None), GRADIENTS)
        recorder.begin_update()

    def after(optimizer, *_):
        recorder.updating = False
        states = [value for state in optimizer.state.values() for value in state.values()]
        recorder.add_all((value for value in states if isinstance(value, torch.Tensor)), OPTIMIZER)

    call = nn.Module.__call__

    def module_call(module, *args, **kwargs):
        recorder.enter(module)
        try:
            return call(module, *args, **kwargs)  # with the hooks of the strategies
        finally:
            recorder.leave()

    meta = ShardingPropagator._propagate_tensor_meta_non_cached

    def without_recording(*args):
        """Find the shape of a result. For this, DTensor computes with fake tensors of the whole, undivided shape."""
        recorder.paused, before = True, recorder.paused
        try:
            return meta(*args)
        finally:
            recorder.paused = before

    stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
    stack.enter_context(mock.patch.object(nn.Module, "__call__", module_call))
    stack.enter_context(mock.patch.object(ShardingPropagator, meta.__name__, without_recording))
    hooks = (
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    )
    for hook in hooks:
        stack.callback(hook.remove)
    return stack


def short(name: str) -> str:
    """Return the name of a module without the parts that wrappers add."""
    wrappers = ("module", "_checkpoint_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in wrappers)
