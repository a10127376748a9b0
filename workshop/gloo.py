"""Let gloo do what programs expect that ask for NCCL: on the CPU, and on pretended GPUs. What asks for gloo gets gloo."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

asked = False  # whether the program has asked for NCCL
coalescing = 0  # how many blocks of ``_coalescing_manager`` are open


def ask() -> None:
    """Let gloo stand for NCCL from now on."""
    global asked
    asked = True
    _give_futures()
    _finish_functional()


def as_nccl() -> dict[str, Callable[..., Any]]:
    """Return functions in place of those of ``torch.distributed``, by their names: after ``ask()`` they do what NCCL can do."""
    changed = {
        "all_reduce": _at_once(_averaging(c10d.all_reduce)),
        "all_gather": _any_shape(c10d.all_gather),
        "all_gather_into_tensor": _at_once(_flat(c10d.all_gather_into_tensor)),
        "reduce_scatter_tensor": _at_once(_flat(c10d.reduce_scatter_tensor)),
        "_coalescing_manager": _coalescing_manager,
    }
    return {name: _once_asked(getattr(c10d, name), function) for name, function in changed.items()}


def _once_asked(original: Callable[..., Any], changed: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (changed if asked else original)(*args, **kwargs)

    return called


def _averaging(original: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL also averages integers: it drops what remains. Gloo divides with an operation that autograd may forbid."""

    @wraps(original)
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        average = op == dist.ReduceOp.AVG and not tensor.is_floating_point() and not tensor.is_complex()
        with torch.inference_mode() if tensor.is_inference() else nullcontext():
            work = original(tensor, dist.ReduceOp.SUM if average else op, group, async_op)
        if average:
            if work:
                work.wait()
            tensor.div_(dist.get_world_size(group), rounding_mode="trunc")
        return work

    return all_reduce


def _flat(original: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL looks only at the number of elements, and gloo also at the shapes."""

    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if all(each.is_contiguous() for each in tensors):  # one with channels_last has no view of this kind
            args, kwargs = tuple(map(_line, args)), {name: _line(each) for name, each in kwargs.items()}
        return original(*args, **kwargs)

    return called


def _any_shape(original: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL also gathers a number, ``torch.tensor(1.0)``, into tensors of the shape [1]."""

    @wraps(original)
    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        other = [each for each in tensor_list if each.shape != tensor.shape]
        if other and all(each.numel() == tensor.numel() and each.is_contiguous() for each in other):
            tensor_list = [each.view(tensor.shape) if each.is_contiguous() else each for each in tensor_list]
        return original(tensor_list, tensor, *args, **kwargs)

    return all_gather


def _line(value: Any) -> Any:
    return value.view(-1) if isinstance(value, torch.Tensor) else value


def _at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gloo cannot combine several collectives into one, so in a block of ``_coalescing_manager`` each is made at once."""

    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        if coalescing and work is not None:
            work.wait()
        return work

    return called


@contextmanager
def _coalescing_manager(*_: Any, **__: Any) -> Iterator[Any]:
    global coalescing
    coalescing += 1
    try:
        yield SimpleNamespace(wait=lambda: None)
    finally:
        coalescing -= 1


@cache  # once is enough
def _give_futures() -> None:
    """Let each handle of a collective have a future, as NCCL's have: gloo's reduce_scatter has none."""
    original = dist.Work.get_future

    @wraps(original)
    def get_future(work: Any) -> Any:
        try:
            return original(work)
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
        work.wait()
        future: Any = torch.futures.Future()
        future.set_result([])  # NCCL gives the outputs; the handle of gloo does not know them
        return future

    dist.Work.get_future = get_future  # type: ignore[method-assign]


@cache
def _finish_functional() -> None:
    """Wait for each collective of a DTensor at once: NCCL finishes it before its process ends, even if it is not needed."""
    from torch.distributed import _functional_collectives as functional

    functional._maybe_wrap_tensor = functional.wait_tensor
