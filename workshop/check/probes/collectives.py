"""The collectives that the program calls, and those that FSDP calls during the backward pass."""

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import Join

from workshop.check.evidence.events import Collective, InnerCollective, UnevenJoined
from workshop.check.probes.contents import first_tensor
from workshop.check.probes.probe import Function, Probe, around, before

COLLECTIVES = """
    all_reduce all_reduce_coalesced reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single broadcast
    broadcast_object_list all_gather all_gather_into_tensor all_gather_single all_gather_object gather gather_object
    scatter scatter_object_list all_to_all all_to_all_single barrier monitored_barrier send recv isend irecv
"""


class Collectives(Probe):
    """Notes the functions of ``torch.distributed``, and ``Join``."""

    writes = (Collective, InnerCollective, UnevenJoined)
    always = True
    inside = 0  # of a collective that is made of others

    @around(dist, *COLLECTIVES.split(), named=True)
    @around(c10d, *COLLECTIVES.split(), named=True)
    def _call(self, name: str, original: Function, *args: Any, **kwargs: Any) -> Any:
        if self.inside or threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)
        inner = self.recorder.quiet > 0
        with self.recorder.guard:
            (self._note_inner if inner else self._note)(name, [*args, *kwargs.values()])
        self.inside += not inner
        try:
            return original(*args, **kwargs)
        finally:
            self.inside -= not inner

    def _note(self, name: str, arguments: list[object]) -> None:
        tensor = first_tensor(arguments)
        if tensor is None:
            tensor = next((each for each in arguments if isinstance(each, torch.Tensor)), None)  # a scalar
        shape = None if tensor is None or name.endswith(("object", "list")) else tuple(tensor.shape)
        self.note_here(Collective(name=name, shape=shape, dtype="" if tensor is None else str(tensor.dtype)))

    def _note_inner(self, name: str, arguments: list[object]) -> None:
        tensor = first_tensor(arguments) if self.recorder.in_backward else None
        if tensor is not None:  # FSDP's: it gathers layers for the backward pass, and reduces their gradients
            self.recorder.note(InnerCollective(name=name, dtype=str(tensor.dtype)))

    @before(Join, "__enter__")
    def _join(self, join: Join) -> None:
        self.recorder.note(UnevenJoined())
