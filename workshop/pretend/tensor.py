"""A tensor on a pretended GPU, and what happens when an operation of PyTorch gets one.

In C++ the tensor is one of the device type PrivateUse1, so PyTorch's own autograd threads and DDP's reducer take it. In Python
its ``device`` is ``cuda:N``. The C++ side knows only device 0, so the index of the GPU lives in Python.
"""

from collections import OrderedDict
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from workshop.pretend import collectives, devices, guard
from workshop.pretend.devices import index_of, is_gpu
from workshop.pretend.gpu_only import ONLY_ON_GPU, PACKING

aten = torch.ops.aten
# Operations that take tensors of different devices, and operations that take indices on the CPU.
MIXING = {
    *(aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor, aten._copy_from.default),
    *(aten._foreach_copy_.default, aten.is_same_size.default, aten.is_set_to.default),
}
INDEXING = {
    *(aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default),
    *(aten._unsafe_index.Tensor, aten._unsafe_index_put.default),
}
# Operations after which the CPU needs a number from the GPU, often the size of the result.
WAITING = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.repeat_interleave.Tensor, aten.bincount.default),
}
# Operations that a GPU sums in float32, and that few CPUs compute fast in bfloat16 or float16.
SUMMING = {
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.convolution.default, aten.convolution_backward.default),
}
LOW = (torch.bfloat16, torch.float16)
pinned: dict[int, Any] = {}  # address of a storage in pinned memory -> weak reference
saved: dict[int, str] = {}  # address of a storage that torch.save is about to write -> its device


class PretendTensor(torch.Tensor):
    """A tensor on the pretended GPU ``gpu`` that computes with ``on_cpu``, a tensor on the CPU."""

    on_cpu: torch.Tensor
    gpu: int

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor, gpu: int):
        if on_cpu.layout is not torch.strided:
            raise NotImplementedError("Pretended GPUs cannot hold sparse tensors.")
        self = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.size(), strides=on_cpu.stride(), storage_offset=on_cpu.storage_offset(), dtype=on_cpu.dtype,
            layout=on_cpu.layout, device=torch.device(devices.NAME, 0), requires_grad=False,
        )  # fmt: skip
        self.on_cpu, self.gpu = on_cpu, gpu
        # DTensor finds out the shapes of results with fake tensors, which need no memory.
        if torch._C._has_storage(on_cpu) and not isinstance(on_cpu, FakeTensor):
            # Without this attribute, the weak reference to the storage would die at once.
            self.storage_held = on_cpu.untyped_storage()
            devices.hold(self.storage_held, gpu)
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if answer := ANSWERS.get(func):
            return answer(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # Hooks of the backward pass run where __torch_function__ is switched off, so these must be methods as well.
    def untyped_storage(self):
        return self.on_cpu.untyped_storage()

    def data_ptr(self):
        return self.on_cpu.data_ptr()

    def get_device(self):
        return self.gpu

    def record_stream(self, stream):
        pass

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new):
        if not isinstance(new, PretendTensor):
            return _move(self, new)
        # FSDP1 does this around a forward pass in inference_mode(). PyTorch allows it on CUDA, not on other types of devices.
        if self.is_inference() != new.is_inference():
            with torch.inference_mode(self.is_inference()):
                new = PretendTensor(new.on_cpu.detach(), new.gpu)
        SET_DATA(self, new)
        self.on_cpu, self.gpu, self.storage_held = new.on_cpu.detach(), new.gpu, new.untyped_storage()

    def tolist(self):
        return _tolist(self)

    def numpy(self, *, force=False):
        return _numpy(self, force=force)

    # With these two methods, Module.to() keeps the Parameter objects, which an optimizer may already hold.
    def __tensor_flatten__(self):
        return ["on_cpu"], self.gpu

    @staticmethod
    def __tensor_unflatten__(inner, gpu, size, stride):
        return PretendTensor(inner["on_cpu"], gpu)

    def __repr__(self, **_):
        devices.note_wait()
        with torch.no_grad():
            return f"{repr(self.on_cpu.detach())[:-1]}, device='cuda:{self.gpu}')"

    def __format__(self, spec):  # the one of Tensor formats the number only if the type is exactly Tensor
        return format(self.item() if self.dim() == 0 else str(self), spec)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            new = PretendTensor(self.on_cpu.detach().clone(), self.gpu)
            if isinstance(self, torch.nn.Parameter):
                new._is_param = True
            memo[id(self)] = new.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        """Save the tensor as PyTorch saves one on a GPU."""
        storage = torch.storage.TypedStorage(
            wrap_storage=self.on_cpu.untyped_storage(), dtype=self.dtype, _internal=True
        )
        saved[storage._untyped_storage.data_ptr()] = f"cuda:{self.gpu}"
        layout = (storage, self.storage_offset(), tuple(self.size()), self.stride())
        if not isinstance(self, torch.nn.Parameter):
            return torch._utils._rebuild_tensor_v2, (*layout, self.requires_grad, OrderedDict())
        data = _Call(torch._utils._rebuild_tensor_v2, (*layout, False, OrderedDict()))
        return torch._utils._rebuild_parameter, (data, self.requires_grad, OrderedDict())


class _Call:
    """A function and its arguments, which pickle writes as the call of this function."""

    def __init__(self, *call: object):
        self.call = call

    def __reduce_ex__(self, protocol):
        return self.call


def _tolist(tensor: PretendTensor):
    devices.note_wait()
    return tensor.on_cpu.tolist()


def _numpy(tensor: PretendTensor, *_, force=False, **__):
    if force:
        return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    devices.note("numpy")
    raise TypeError(
        f"can't convert cuda:{tensor.gpu} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
        "first."
    )


def _to(self: torch.Tensor, *args, **kwargs):
    """Tensor.to: the tensor itself if nothing changes. PyTorch would compare devices in C++, where all have index 0."""
    with torch._C.DisableTorchFunctionSubclass():
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        options = {name: value for name, value in kwargs.items() if name not in ("copy", "memory_format")}
        device, dtype, *_ = torch._C._nn._parse_to(*args[:2], **options)
        same_place = device is None or (is_gpu(device) and index_of(device) == getattr(self, "gpu", None))
        if isinstance(self, PretendTensor) and same_place and not kwargs.get("copy"):
            memory_format = kwargs.get("memory_format")
            if dtype in (None, self.dtype) and (
                memory_format is None or self.is_contiguous(memory_format=memory_format)
            ):
                return self
        return torch.Tensor.to(self, *args, **kwargs)


def _cuda(self: torch.Tensor, device=None, non_blocking=False, **_):
    return _to(self, torch.device("cuda", index_of(device)), non_blocking=non_blocking)


ANSWERS = {
    torch.Tensor.tolist: _tolist,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _numpy,
    torch.Tensor.device.__get__: lambda self: torch.device("cuda", self.gpu),
    torch.Tensor.is_cuda.__get__: lambda self: True,
    torch.Tensor.is_cpu.__get__: lambda self: False,
    torch.Tensor.get_device: lambda self: self.gpu,
    torch.Tensor.data_ptr: lambda self: self.on_cpu.data_ptr(),
    torch.Tensor.untyped_storage: lambda self: self.on_cpu.untyped_storage(),
    torch.Tensor.record_stream: lambda self, stream: None,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
}


def _tensors(value, found: list) -> list:
    """Collect the tensors of an argument, which may be a list of tensors or a list of lists."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _tensors(each, found)
    return found


def _replaced(value, change):
    """Return an argument or a result with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, change) for each in value)
    return value


def _of_other_subclass(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one such as DTensor, which unpacks itself first."""
    kind = type(tensor)
    return (
        kind not in (torch.Tensor, torch.nn.Parameter)
        and not issubclass(kind, PretendTensor)
        and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    )


def compute(func, args, kwargs):
    """Do an operation: check the devices as CUDA does, compute on the CPU, put the result on the GPU."""
    tensors = _tensors((args, tuple(kwargs.values())), [])
    if any(map(_of_other_subclass, tensors)):
        return NotImplemented
    communicates = func.namespace in collectives.NAMESPACES
    if communicates:
        collectives.check(func, args, tensors)
        args = collectives.for_gpus(args, [each for each in tensors if isinstance(each, PretendTensor)])
    gpu = _gpu_of(func, args, kwargs, tensors, communicates)
    if gpu is not None:
        devices.use()
        _check_generator(kwargs.get("generator"))
    if func in (aten.copy_.default, aten._to_copy.default):
        _note_copy(func, args, kwargs, gpu)
    elif func in WAITING and gpu is not None:
        devices.note_wait()
    result = _on_cpu(func, args, kwargs, gpu, tensors)
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], PretendTensor):
        inner = args[0].on_cpu
        # transpose_(), resize_() and others also change the shape of the outer tensor, but that one cannot grow.
        with no_dispatch(), suppress(RuntimeError):
            args[0].as_strided_(inner.size(), inner.stride(), inner.storage_offset())
    wrappers = {id(each.on_cpu): each for each in tensors if isinstance(each, PretendTensor)}
    if gpu is None or (communicates and not wrappers):
        return result

    def wrapped(tensor):
        if isinstance(tensor, PretendTensor):
            return tensor
        if id(tensor) in wrappers:
            return wrappers[id(tensor)]
        if tensor.is_complex():  # the outer tensor would not say that its values are to be conjugated or negated
            tensor = tensor.resolve_conj().resolve_neg()
        return PretendTensor(tensor, gpu)

    if func in PACKING and isinstance(result, tuple):
        return wrapped(result[0]), result[1]
    if torch.is_inference_mode_enabled() and func.is_view and not tensors[0].is_inference():
        with torch.inference_mode(False):  # the view of a normal tensor is a normal tensor
            return _replaced(result, wrapped)
    return _replaced(result, wrapped)


def _on_cpu(func, args, kwargs, gpu: int | None, tensors: list):
    """Compute the operation with the tensors inside of those on a GPU."""
    if is_gpu(kwargs.get("device")):
        kwargs = kwargs | {"device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}

    def inner(tensor):
        return tensor.on_cpu if isinstance(tensor, PretendTensor) else tensor

    args, kwargs = _replaced(args, inner), {name: _replaced(value, inner) for name, value in kwargs.items()}
    if own := ONLY_ON_GPU.get(func):
        return own(*args, **kwargs)
    if func._schema.name in collectives.FLAT and args[0].is_contiguous() and args[1].is_contiguous():
        _, work = func(args[0].view(-1), args[1].view(-1), *args[2:], **kwargs)
        return args[0], work
    random = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    if gpu is not None and random and not any(isinstance(inner(each), FakeTensor) for each in tensors):
        with devices.random_state(gpu):
            return func(*args, **kwargs)
    if func in SUMMING and tensors[0].dtype in LOW:
        return _in_type(func, args, kwargs, tensors[0].dtype, torch.float32)
    try:
        return func(*args, **kwargs)
    except NotImplementedError as error:  # CUDA has some operations for more types, such as histc() for integers
        if "_cpu" not in str(error) or not tensors or tensors[0].is_complex() or func._schema.is_mutable:
            raise
        kind = tensors[0].dtype
        return _in_type(func, args, kwargs, kind, torch.float32 if kind in LOW else torch.float64)


def _in_type(func, args, kwargs, kind: torch.dtype, wider: torch.dtype):
    """Do an operation with ``wider`` in place of a type, and return the results in that type."""

    def converted(source: torch.dtype, target: torch.dtype):
        return lambda each: each.to(target) if each.dtype == source else each

    widen = converted(kind, wider)
    result = func(*_replaced(args, widen), **{name: _replaced(value, widen) for name, value in kwargs.items()})
    return _replaced(result, converted(wider, kind))


def _gpu_of(func, args, kwargs, tensors: list, communicates: bool) -> int | None:
    """Return the GPU of the result, None for the CPU; raise what CUDA raises for tensors on different devices."""
    mixing = communicates or func in MIXING or func in PACKING or "_foreach_copy_" in func._schema.name
    index = _common_index(tensors, mixing, func in INDEXING)
    changes = func._schema.name.endswith("_") and isinstance(args[0], torch.Tensor)  # the first tensor
    if index is not None and changes and not mixing and not isinstance(args[0], PretendTensor):
        raise _two_devices(f"cuda:{index}", "cpu")
    target = kwargs.get("device")
    if target is None:
        return index
    return index_of(target) if is_gpu(target) else None


def _common_index(tensors: list, mixing: bool, indexing: bool) -> int | None:
    """Return the GPU of an operation's tensors; raise CUDA's error if they are on different devices."""
    index, on_cpu = None, None
    for each in tensors:
        if not isinstance(each, PretendTensor):
            on_cpu = each if on_cpu is None and each.dim() > 0 else on_cpu
        elif index is None:
            index = each.gpu
        elif index != each.gpu and not mixing and each.dim() > 0:
            raise _two_devices(f"cuda:{index}", f"cuda:{each.gpu}")
    if index is not None and on_cpu is not None and not mixing and not indexing:
        raise _two_devices(f"cuda:{index}", "cpu", f" (a tensor of {' x '.join(map(str, on_cpu.shape))})")
    return index


def _two_devices(first: str, second: str, which: str = "") -> RuntimeError:
    devices.note("two-devices", f"{first} and {second}{which}")
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"
    )


def _check_generator(generator: torch.Generator | None) -> None:
    if generator is not None and generator._cdata not in devices.generators:
        devices.note("generator")
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")


def _note_copy(func, args, kwargs, index: int | None) -> None:
    """Count a copy between the CPU and a GPU."""
    in_place = func is aten.copy_.default
    source = args[1] if in_place else args[0]
    from_gpu = isinstance(source, PretendTensor)
    to_gpu = isinstance(args[0], PretendTensor) if in_place else index is not None
    non_blocking = bool(kwargs.get("non_blocking", args[2] if in_place and len(args) > 2 else False))
    if from_gpu and not to_gpu:
        if non_blocking:
            devices.note("to-cpu")
        else:
            devices.note_wait()
    elif to_gpu and not from_gpu and source.dim() > 0:
        pinned = is_pinned(source)
        # Whether a library asks for it without pinned memory is not up to the program.
        free = non_blocking and (pinned or devices.called_by_program())
        devices.note(("pinned" if pinned else "pageable") + "-non-blocking" * free)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor on the CPU is in pinned memory."""
    return tensor.untyped_storage()._cdata in pinned


class Dispatch(TorchDispatchMode):
    """Sends to ``compute`` what creates tensors on a GPU or gets some inside of lists."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in ("aten::to", "aten::type_as"):  # in inference mode; otherwise they arrive as _to_copy
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.empty.memory_format and (used := collectives.list_of_used(func, args, kwargs)) is not None:
            return used
        if FakeTensor in types:  # the mode of fake tensors comes after this one
            return func(*args, **kwargs)
        if types or is_gpu(kwargs.get("device")) or func.namespace in collectives.NAMESPACES:
            return compute(func, args, kwargs)
        if kwargs.get("pin_memory"):
            return func(*args, **kwargs | {"pin_memory": False}).pin_memory()
        if args and type(args[0]) in (int, float) and str(func._schema.arguments[0].type) == "Tensor":
            args = (torch.tensor(args[0]), *args[1:])  # the 0.5 of 0.5 * x, read from the graph, arrives as a number
        return func(*args, **kwargs)


SET_DATA = torch.Tensor.data.__set__  # tensor.data = ...
CREATING = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)  # from numbers, also those on a GPU


class NameDevice(TorchFunctionMode):
    """Replaces "cuda" by the current GPU in all calls: C++ would ask CUDA which one that is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.as_tensor and isinstance(args[0], PretendTensor):
            given = dict(zip(("dtype", "device"), args[1:], strict=False)) | kwargs
            func, args, kwargs = torch.Tensor.to, args[:1], {"dtype": None, "device": None} | given
        if func is torch.Tensor.type and str(args[1:]).startswith("('torch.cuda."):
            name = args[1].rpartition(".")[2]  # of the type, such as FloatTensor
            func, args = torch.Tensor.to, (args[0], torch.device("cuda"), getattr(torch, name).dtype)
        if func is torch.Tensor.cuda:
            return _cuda(*args, **kwargs)
        if func is torch.device and len(args) == 1 and isinstance(args[0], int):
            return func("cuda", args[0])
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool):
            args = (args[0], torch.device("cuda", index_of(args[1])), *args[2:])
        # module.to(1) passes the number as a device of this type.
        if func is torch.Tensor.to and len(args) > 1 and getattr(args[1], "type", "") == devices.NAME:
            args = (args[0], torch.device("cuda", args[1].index), *args[2:])
        if isinstance(number := kwargs.get("device"), int):
            kwargs = kwargs | {"device": torch.device("cuda", index_of(number))}
        if func == SET_DATA and isinstance(args[1], PretendTensor) and not isinstance(args[0], PretendTensor):
            return _move(*args)
        if func in CREATING:
            args = tuple(map(_fetched, args))
        if func in (torch.ctc_loss, torch.nn.functional.ctc_loss):  # the lengths may be on the CPU
            args = (*args[:2], *map(_listed, args[2:4]), *args[4:])
        if func is torch.device or (func in ANSWERS and func is not torch.Tensor.to):
            return func(*args, **kwargs)
        with devices.operation_on(gpu := _gpu_in(args)):
            result = func(*map(_named, args), **{name: _named(value) for name, value in kwargs.items()})
        return result if gpu is None else guard.send_back(result, gpu)


def _gpu_in(args) -> int | None:
    """Return the GPU of the first argument that is on one."""
    for each in args:
        first = each[0] if type(each) in (list, tuple) and each else each
        if isinstance(first, PretendTensor):
            return first.gpu
    return None


def attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what the program has set on a tensor."""
    return {name: value for name, value in vars(tensor).items() if name not in ("on_cpu", "gpu", "storage_held")}


def _move(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Do what ``tensor.data = moved`` does to a different kind of device, as both versions of FSDP do with parameters."""
    moved = moved.detach()
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, tensor.requires_grad)
    vars(moved).update(attributes(tensor))
    try:
        torch.utils.swap_tensors(tensor, moved)
    except RuntimeError:
        raise NotImplementedError(
            "Pretended GPUs cannot exchange the data of a parameter that autograd uses with data on the CPU, as CPUOffload of "
            "FSDP1 does. Use fully_shard with CPUOffloadPolicy."
        ) from None


def _fetched(value):
    """Return lists with the tensors on the CPU that are in them on a GPU."""
    if type(value) not in (list, tuple):
        return value
    inside = [isinstance(each, PretendTensor) for each in value]
    if any(inside):
        devices.note_wait()
    return type(value)(each.on_cpu if gpu else _fetched(each) for each, gpu in zip(value, inside, strict=True))


def _listed(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _named(value):
    if isinstance(value, str | torch.device) and str(value) == "cuda":
        return torch.device("cuda", index_of("cuda"))
    return value
