"""Tensors: this process's part of a sharded one, the bytes that autograd keeps, and whether bfloat16 is fast."""

import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def own_part(tensor: Any) -> Any:
    """This process's part of a tensor that is spread over several (a DTensor); else the tensor itself.

    Whatever is asked of a DTensor itself may be a collective, which all ranks would have to call.
    """
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Kept:
    """What a forward pass has kept so far.

    Attributes:
        bytes: in all, each memory counted once; without weights, FSDP's gathered ones too.
    """

    def __init__(self):
        self._found = {}

    def note(self, tensor):
        """Note a tensor that autograd keeps, and return it."""
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            # The tensor is held, so that nobody else gets its address meanwhile.
            self._found.setdefault(storage.data_ptr(), (storage.nbytes(), tensor))
        return tensor

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self._found.values())


@contextmanager
def kept_for_backward():
    """Count, in a with-block, what autograd keeps for the backward pass; gives a ``Kept``. Let go of it before the backward."""
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
        yield kept


def bf16_is_fast(device) -> bool:
    """Whether a ``torch.device`` computes in bfloat16 faster than in float32, for all that it says of itself.

    On a CPU the instructions have to be there (avx512_bf16, amx_bf16, ARM's bf16); without them bfloat16 is emulated, and slower.
    """
    if device.type == "cuda":  # ROCm too
        return torch.cuda.is_bf16_supported(including_emulation=False)
    cpuinfo = Path("/proc/cpuinfo")
    if device.type != "cpu" or not cpuinfo.exists():
        return False
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", cpuinfo.read_text()) is not None
