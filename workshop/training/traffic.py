"""Measure what a process holds and sends: the bytes of its tensors, and the bytes and calls of its collectives."""

import gc
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from workshop.tensors import own_part
from workshop.training.device import BUS_FACTOR


def tensor_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors in this process, with shared memory counted once; on an accelerator, the peak.

    Directly after the optimizer step, these are parameters, gradients, moments, and what the strategy keeps in addition.
    """
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated()
    found = {}
    for each in gc.get_objects():
        if not issubclass(type(each), torch.Tensor):
            continue
        for tensor in (each, each.grad if each.is_leaf else None):
            if tensor is None or (tensor := own_part(tensor)).device.type != device.type:
                continue
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


# Parts of the names of PyTorch's operations and NCCL's kernels, without underscores, and the collective of nccl-tests for each.
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "send": "send",
}
# Of S bytes on N processes, each process sends this share.
SENT = {**BUS_FACTOR, "all_to_all": lambda n: (n - 1) / n, "send": lambda n: 1}


class Messages(TorchDispatchMode):
    """Count the bytes that this process sends in collectives in a with-block.

    Attributes:
        bytes: by the formulas of nccl-tests. For S bytes (of the full tensor) on N processes, each process sends 2 (N-1)/N S
            in an all-reduce, (N-1)/N S in an all-gather, reduce-scatter or all-to-all, and S in a broadcast or send.
        calls: how often each collective was called.
    """

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = 0, {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count(operation, args)
        return operation(*args, **(kwargs or {}))

    def count(self, operation, args) -> None:
        """Count an operation of PyTorch if it is a collective."""
        if found := collective_of(operation, args):
            kind, group, whole = found
            processes = dist.get_world_size() if group is None else group.size()
            self.bytes += round(whole * SENT[kind](processes))
            self.calls[kind] = self.calls.get(kind, 0) + 1


def collective_of(operation, args) -> tuple[str, dist.ProcessGroup | None, int] | None:
    """Return the kind of a collective, its group (None: not found) and the bytes of the whole tensor; None: it is not one."""
    space, _, name = operation.name().partition("::")
    kind = collective(name)
    if space not in ("c10d", "_c10d_functional") or not kind:
        return None
    sizes, group = [_bytes(arg) for arg in args], group_of(args)
    # The largest tensor is the full one: the output of an all-gather, the input of a reduce-scatter.
    whole = max(sizes) if space == "c10d" and kind != "broadcast" else sizes[0]
    if space == "_c10d_functional" and kind == "all_gather":
        whole *= dist.get_world_size() if group is None else group.size()
    return kind, group, whole


def collective(name: str) -> str:
    """Return the collective of an operation or kernel, for example "all_gather" for "_allgather_base_"; "": none."""
    name = name.replace("_", "").lower()
    return next((kind for part, kind in COLLECTIVES.items() if part in name), "")


def _bytes(value) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 0


def group_of(args) -> dist.ProcessGroup | None:
    """Return the group of a collective, which is one of the arguments of PyTorch's operation; None: not found."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
        if isinstance(each, str):
            with suppress(Exception):  # other arguments are texts too, such as "sum"
                return c10d._resolve_process_group(each)
    return None
