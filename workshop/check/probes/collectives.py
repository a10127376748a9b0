"""The collectives that the program calls, and those that FSDP calls during the backward pass."""

import threading
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

from workshop.check.evidence.events import Collective, InnerCollective, UnevenJoined
from workshop.check.probes.contents import first_tensor
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "broadcast_object_list",
    "send",
    "recv",
    "isend",
    "irecv",
    "all_reduce_coalesced",
)


class Collectives(Probe):
    """Notes the functions of ``torch.distributed``, and ``Join``."""

    writes = (Collective, InnerCollective, UnevenJoined)
    always = True
    inside = 0  # of a collective that is made of others

    def install(self) -> None:
        """Replace them."""
        for name in COLLECTIVES:
            for module in (dist, c10d):
                self.patches.wrap(module, name, partial(self._noting, name=name))
        self.patches.wrap(Join, "__enter__", self._enter)

    def _noting(self, original: Function, name: str) -> Function:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self.inside or threading.current_thread() is not threading.main_thread():
                return original(*args, **kwargs)
            if self.recorder.quiet:
                with self.recorder.guard:
                    self._note_inner(name, [*args, *kwargs.values()])
                return original(*args, **kwargs)
            with self.recorder.guard:
                self._note(name, [*args, *kwargs.values()])
            self.inside += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.inside -= 1

        return collective

    def _note(self, name: str, arguments: list[object]) -> None:
        tensor = first_tensor(arguments)
        if tensor is None:
            tensor = next((each for each in arguments if isinstance(each, torch.Tensor)), None)  # a scalar
        has_shape = tensor is not None and not name.endswith(("object", "list"))
        self.recorder.note(
            Collective(
                name=name,
                shape=tuple(tensor.shape) if tensor is not None and has_shape else None,
                dtype="" if tensor is None else str(tensor.dtype),
                where=self.recorder.where(),
            )
        )

    def _note_inner(self, name: str, arguments: list[object]) -> None:
        tensor = first_tensor(arguments) if self.recorder.in_backward else None
        if tensor is not None:  # FSDP's: it gathers layers for the backward pass, and reduces their gradients
            self.recorder.note(InnerCollective(name=name, dtype=str(tensor.dtype)))

    def _enter(self, original: Function) -> Function:
        def __enter__(join: Join) -> Any:
            with self.recorder.guard:
                self.recorder.note(UnevenJoined())
            return original(join)

        return __enter__
