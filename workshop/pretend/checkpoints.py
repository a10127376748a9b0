"""torch.save and torch.load with tensors on pretended GPUs: a file knows on which GPU each tensor was."""

from functools import wraps

import torch

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


def install() -> None:
    """Save and load tensors with their pretended device."""
    torch.serialization.register_package(5, _tag, _restore)
    torch._utils._rebuild_tensor_v2 = _rebuild(torch._utils._rebuild_tensor_v2)
    torch.serialization.add_safe_globals([PretendTensor])
