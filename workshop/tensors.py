"""Inspect tensors: the local shard of a DTensor, the bytes that autograd keeps, and whether bfloat16 is fast."""

import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def own_part(tensor: Any) -> Any:
    """Return the local shard of a DTensor, or of a ShardedTensor of FSDP1; any other tensor itself.

    An operation on the whole tensor may be a collective, which all ranks would have to call.
    """
    if hasattr(tensor, "local_shards"):
        shards = tensor.local_shards()
        return shards[0].tensor if shards else torch.empty(0)
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(tensor, dtensor() or ())


def dtensor() -> Any:
    """Return the class DTensor, or None if nothing has imported it, which takes half a second."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def attend_locally(attention: Any, query: Any, *others: Any, **options: Any) -> Any:
    """Compute attention for DTensors whose ranks have whole heads or samples, because DTensor cannot do it on the CPU.

    Args:
        attention: a function such as ``scaled_dot_product_attention``.
        query, others, options: its arguments; ``query`` is a DTensor, (batch, heads, length, width).

    Raises:
        NotImplementedError: the ranks have parts of the length or of the width.
    """
    from torch.distributed.tensor import DTensor  # needs a second

    if any(each.is_partial() or (each.is_shard() and each.dim > 1) for each in query.placements):
        raise NotImplementedError(
            "attention of a DTensor on the CPU needs whole heads: Replicate(), Shard(0) or Shard(1)"
        )
    options = {name: own_part(value) for name, value in options.items()}
    result = attention(own_part(query), *map(own_part, others), **options)
    return DTensor.from_local(result, query.device_mesh, query.placements, run_check=False)


class Kept:
    """Count what a forward pass has kept so far.

    Attributes:
        bytes: of all tensors, with shared memory counted once; parameters do not count, also those that FSDP has gathered.
    """

    def __init__(self):
        self._found = {}

    def note(self, tensor):
        """Note a tensor that autograd keeps, and return it."""
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, torch.nn.Parameter):
            # A DTensor has no memory of its own, and the result of its unfinished collective neither: the tensor in it has.
            inner = getattr(tensor, "_local_tensor", tensor)
            storage = getattr(inner, "elem", inner).untyped_storage()
            # Keep the tensor, so that no other tensor gets the same address.
            self._found.setdefault(storage.data_ptr(), (storage.nbytes(), tensor))
        return tensor

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self._found.values())


@contextmanager
def kept_for_backward():
    """Count what autograd keeps in a with-block; yield a ``Kept``, which you must delete before the backward pass."""
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
        yield kept


def bf16_is_fast(device) -> bool:
    """Return whether a ``torch.device`` computes faster in bfloat16 than in float32, according to what it reports.

    A CPU needs special instructions (avx512_bf16, amx_bf16, ARM's bf16); without them, bfloat16 is emulated and slower.
    """
    if device.type == "cuda":  # ROCm too
        return torch.cuda.is_bf16_supported(including_emulation=False)
    cpuinfo = Path("/proc/cpuinfo")
    if device.type != "cpu" or not cpuinfo.exists():
        return False
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", cpuinfo.read_text()) is not None
