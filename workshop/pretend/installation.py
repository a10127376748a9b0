"""Put pretended GPUs into this process."""

import os
import sys
import weakref

import torch
from torch.utils import backend_registration

from workshop.errors import UserError
from workshop.pretend import devices

_kept: list = []  # what must not be freed before the process ends


def unsupported() -> str:
    """Return why this version of PyTorch cannot pretend GPUs; an empty string if it can."""
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return ""
    return f"pretended GPUs need torch 2.10 or newer, and this is torch {torch.__version__}"


def install(gpus: int) -> None:
    """Give the node of this process ``gpus`` GPUs, from now on. Its program must not have looked for GPUs yet.

    Raises:
        UserError: this version of PyTorch lacks an interface that the pretended GPUs need.
    """
    if reason := unsupported():
        raise UserError(reason)
    devices.total = gpus
    try:
        _install()
    except (AttributeError, ImportError) as error:
        raise UserError(f"pretended GPUs do not work with torch {torch.__version__}: {error}") from None


def _install() -> None:
    from torch._subclasses import fake_tensor
    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_clipping

    from workshop.pretend import autocast, checkpoints, collectives, cuda, gpu_only, guard, parameters, tensor

    backend_registration._setup_privateuseone_for_python_backend(
        devices.NAME, cuda.PrivateUse1Module(), device_guard=guard.Guard()
    )
    # It arranges the parameters for cuDNN, and asks CUDA for the GPU.
    torch.nn.RNNBase.flatten_parameters = lambda self: None
    PretendTensor = tensor.PretendTensor
    PretendTensor.device = property(lambda self: torch.device("cuda", self.gpu))
    PretendTensor.is_cuda, PretendTensor.is_cpu = property(lambda self: True), property(lambda self: False)
    parameters.install()
    _not_a_wrapper(PretendTensor)
    # C++ would say that it is on the pretended device type.
    DTensor.device = property(lambda self: self._local_tensor.device)
    cuda.install()
    guard.install()
    collectives.install()
    checkpoints.install()
    autocast.install()
    _kept.append(gpu_only.install())
    _pin_memory(tensor.pinned)
    _copy_between_gpus()
    original = torch.UntypedStorage.resize_

    def resize_(self, size):
        result = original(self, size)
        devices.resized(self)
        return result

    torch.UntypedStorage.resize_ = resize_
    # Optimizers and clip_grad_norm_ use foreach, their default on CUDA, for the types of tensors in these two lists.
    of_optimizers.append(PretendTensor)
    of_clipping.append(PretendTensor)
    # PyTorch cannot compile for a device that it does not know, so the functions stay as they are.
    torch.compile = lambda model=None, **_: (lambda function: function) if model is None else model
    torch.nn.Module.compile = lambda self, *_, **__: None
    torch._C._ensureCUDADeviceGuardSet()
    fake_tensor.init_gpu_context = lambda device: None  # it makes a tensor on a real GPU
    # torch.tensor(..., device="cuda") makes the tensor on the CPU and then copies it.
    torch._C._set_only_lift_cpu_tensors(True)
    for mode in (tensor.Dispatch(), tensor.NameDevice()):
        mode.__enter__()
        _kept.append(mode)
    os.register_at_fork(after_in_child=devices.after_fork)


def _not_a_wrapper(kind):
    """Before FSDP sends the parameters of rank 0, it takes a wrapper apart: it would find tensors on the CPU."""
    dispatch = sys.modules["torch.utils._python_dispatch"]
    original = dispatch.is_traceable_wrapper_subclass

    def is_traceable_wrapper_subclass(value):
        return not isinstance(value, kind) and original(value)

    for name in ("torch.distributed.fsdp._init_utils", "torch.distributed.fsdp._fully_shard._fsdp_init"):
        if loaded := sys.modules.get(name):
            loaded.is_traceable_wrapper_subclass = is_traceable_wrapper_subclass
    dispatch.is_traceable_wrapper_subclass = is_traceable_wrapper_subclass


def _pin_memory(pinned: dict) -> None:
    """Remember which tensors are in pinned memory. Here, pinned memory is a copy in usual memory."""

    def pin_memory(self, device=None):
        copy = torch.Tensor.clone(self).detach()
        copy.storage_held = storage = copy.untyped_storage()
        pinned[storage._cdata] = weakref.ref(storage, lambda _, key=storage._cdata: pinned.pop(key, None))
        return copy

    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.is_pinned = lambda self, device=None: self.untyped_storage()._cdata in pinned


def _copy_between_gpus() -> None:
    """What DataParallel uses, which PyTorch has in C++ for CUDA only."""
    from torch.nn.parallel import comm

    def place(device):
        return torch.device("cuda", devices.index_of(device))

    def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None):
        parts = tensor.split(chunk_sizes, dim) if chunk_sizes else tensor.chunk(len(devices), dim)
        return tuple(part.to(place(device)) for part, device in zip(parts, devices, strict=False))

    def gather(tensors, dim=0, destination=None, *, out=None):
        return torch.cat([each.to(place(destination)) for each in tensors], dim)

    def broadcast_coalesced(tensors, devices, buffer_size=0):
        return [[each.to(place(device), copy=True) for each in tensors] for device in devices]

    def reduce_add_coalesced(inputs, destination=None, buffer_size=0):
        return tuple(sum(each.to(place(destination)) for each in same) for same in zip(*inputs, strict=True))

    comm.scatter, comm.gather = scatter, gather
    comm.broadcast_coalesced, comm.reduce_add_coalesced = broadcast_coalesced, reduce_add_coalesced
