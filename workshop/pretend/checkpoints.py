"""torch.save and torch.load with tensors on pretended GPUs: a file knows on which GPU each tensor was."""

import contextlib
from functools import wraps

import torch
from torch.distributed.fsdp import _flat_param, _state_dict_utils

from workshop.pretend import devices
from workshop.pretend.tensor import PretendTensor, saved


def _tag(storage) -> str | None:
    """Return the device to write into the file for a storage, or None for one that was on the CPU."""
    return saved.pop(storage.data_ptr(), None)


def _restore(storage, location: str):
    if not location.startswith("cuda"):
        return None
    index = devices.current() if location == "cuda" else int(location.partition(":")[2])
    if index >= devices.count():
        raise RuntimeError(
            f"Attempting to deserialize object on CUDA device {index} but torch.cuda.device_count() is {devices.count()}. Please "
            "use torch.load with map_location to map your storages to an existing device."
        )
    storage.pretended_index = index
    return storage


def _to_gpu(storage, device=None, non_blocking=False):
    """``storage.cuda()``, as in ``map_location=lambda storage, location: storage.cuda()``."""
    return _restore(storage, str(torch.device("cuda" if device is None else device)))


def _rebuild(original):
    @wraps(original)  # the names of the original, by which a file refers to it
    def rebuild(storage, *layout):
        tensor = original(storage, *layout)
        index = getattr(getattr(storage, "_untyped_storage", storage), "pretended_index", None)
        if index is None:
            return tensor
        devices.note("loaded" if index == devices.current() else "loaded-elsewhere", f"GPU {index}")
        return PretendTensor(tensor.detach(), index).requires_grad_(tensor.requires_grad)

    return rebuild


def _to_cpu(original):
    @wraps(original)
    def to_cpu(self):
        # It would replace the data of a parameter that autograd uses, which PyTorch allows between the CPU and CUDA only.
        return contextlib.nullcontext() if isinstance(self.flat_param, PretendTensor) else original(self)

    return to_cpu


def _collected(original):
    @wraps(original)
    def collected(module, state, found, prefix):
        result = original(module, state, found, prefix)
        if state._state_dict_config.offload_to_cpu:
            for name, value in result.items():
                if name.startswith(prefix) and isinstance(value, PretendTensor):
                    result[name] = value.cpu()
        return result

    return collected


def install() -> None:
    """Save and load tensors with their pretended device, and collect the state of FSDP1 on the CPU."""
    _flat_param.FlatParamHandle.to_cpu = _to_cpu(_flat_param.FlatParamHandle.to_cpu)
    _state_dict_utils._full_post_state_dict_hook = _collected(_state_dict_utils._full_post_state_dict_hook)
    torch.UntypedStorage.cuda = _to_gpu
    torch.serialization.register_package(5, _tag, _restore)
    torch._utils._rebuild_tensor_v2 = _rebuild(torch._utils._rebuild_tensor_v2)
    torch.serialization.add_safe_globals([PretendTensor])
