"""Let a program that asks for NCCL, which needs a GPU for each rank, get gloo."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from workshop.gloo import as_nccl, ask


def install() -> None:
    """Replace the functions of ``torch.distributed``."""
    changed = {
        "init_process_group": _on_gloo(c10d.init_process_group, 0),
        "new_group": _on_gloo(c10d.new_group, 2),
        "barrier": partial(_barrier, c10d.barrier),
        **as_nccl(),
    }
    for name, function in changed.items():
        for owner in (dist, c10d, device_mesh):  # the same object in all, as before
            if hasattr(owner, name):
                setattr(owner, name, function)
    dist.is_nccl_available = lambda: True


def _on_gloo(original: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Change the backend, which is an argument at this place, or has its name. Without one, it is NCCL on GPUs."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            args = (*args[:place], _gloo(args[place]), *args[place + 1 :])
        elif "backend" in kwargs:
            kwargs["backend"] = _gloo(kwargs["backend"])
        else:
            ask()
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original(*args, **kwargs)

    return called


def _gloo(backend: Any) -> Any:
    name = backend.lower() if isinstance(backend, str) else ""
    if name and "nccl" not in name and "cuda" not in name:
        return backend
    ask()
    return "gloo" if name else backend


def _barrier(original: Callable[..., Any], group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    return original(group, async_op)
