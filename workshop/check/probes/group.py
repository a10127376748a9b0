"""The process group: how a process joins and leaves it, and the collectives that it calls."""

import os
import sys
import threading
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from workshop.check.evidence.events import (
    Collective,
    GroupDestroyed,
    InnerCollective,
    Joined,
    Joining,
    NotAwaited,
    StoreOpened,
    VariableSet,
)
from workshop.check.evidence.misuses import NeverAwaited, RankGiven
from workshop.check.probes.contents import first_tensor
from workshop.check.probes.probe import Function, Probe, around, before, on
from workshop.tensors import dtensor

COLLECTIVES = """
    all_reduce all_reduce_coalesced reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single broadcast
    broadcast_object_list all_gather all_gather_into_tensor all_gather_single all_gather_object gather gather_object
    scatter scatter_object_list all_to_all all_to_all_single barrier monitored_barrier send recv isend irecv
"""


class Groups(Probe):
    """Records ``init_process_group``, ``destroy_process_group`` and each ``TCPStore`` of the program."""

    writes = (Joining, Joined, RankGiven, GroupDestroyed, StoreOpened, VariableSet)

    def install(self) -> None:
        super().install()
        recorder, original = self.recorder, vars(dist)["TCPStore"]

        class TCPStore(original):  # type: ignore[misc,valid-type]  # mypy does not follow a class that is a variable
            """A recorded store; it is a class so that isinstance() works in the program."""

            def __init__(self, host_name: Any, port: Any, *args: Any, **kwargs: Any) -> None:
                with recorder.guard:
                    master = kwargs.get("is_master", args[1] if len(args) > 1 else False)
                    recorder.note(StoreOpened(port=int(port), master=bool(master)))
                super().__init__(host_name, port, *args, **kwargs)

        TCPStore.__module__, TCPStore.__qualname__ = original.__module__, original.__qualname__
        self.patches.set(dist, "TCPStore", TCPStore)

        sys.addaudithook(self._audit)  # a hook cannot be removed

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.putenv" and self.installed and arguments[0] in (b"MASTER_ADDR", b"MASTER_PORT"):
            self.note_here(VariableSet(name=arguments[0].decode()))

    @around(c10d, "init_process_group")
    @around(device_mesh, "init_process_group")  # init_device_mesh() calls it in a program that does not
    def _init(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.guard:
            size = kwargs.get("world_size", os.environ.get("WORLD_SIZE"))
            backend = kwargs.get("backend", args[0] if args else None)
            joining = Joining(
                backend=None if backend is None else str(backend),
                init_method=str(kwargs.get("init_method") or (args[1] if len(args) > 1 else None)),
                world_size=size if isinstance(size, (int, str, NoneType)) else str(size),
                address=os.environ.get("MASTER_ADDR"),
                port=os.environ.get("MASTER_PORT"),
                given_address=self.recorder.environment.get("MASTER_ADDR"),
                given_port=self.recorder.environment.get("MASTER_PORT"),
            )
            self.note_here(joining)
            if isinstance(rank := kwargs.get("rank"), int) and rank >= 0:
                self.note_here(RankGiven(rank=rank))
        result = original(*args, **kwargs)
        with self.recorder.guard:
            self.note_here(Joined(rank=dist.get_rank(), world_size=dist.get_world_size()))
        return result

    @before(c10d, "destroy_process_group")
    def _destroy(self, *args: Any, **kwargs: Any) -> None:
        self.note_here(GroupDestroyed())


class Collectives(Probe):
    """Records the collectives of ``torch.distributed``."""

    writes = (Collective, InnerCollective, NotAwaited, NeverAwaited)
    package = "torch"
    inside = 0  # above 0 in a collective that calls other collectives

    def clear(self) -> None:
        self.begun: dict[int, NotAwaited] = {}  # not waited for, by the ids of their handles
        self.told: set[str] = set()  # lines with a handle that was not waited for before a step
        self.never: set[str] = set()  # those with one that was never waited for

    @around(c10d, *COLLECTIVES.split(), named=True)
    def _call(self, name: str, original: Function, *args: Any, **kwargs: Any) -> Any:
        if self.inside or threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)
        with self.recorder.guard:
            self._note(name, [*args, *kwargs.values()])
        made_of_others = not self.recorder.quiet
        self.inside += made_of_others
        try:
            result = original(*args, **kwargs)
        finally:
            self.inside -= made_of_others
        starts_only = kwargs.get("async_op") or name in ("isend", "irecv")
        if starts_only and made_of_others and result is not None:
            with self.recorder.guard:
                self._never(self.begun.pop(id(result), None))  # the memory of an earlier handle is used again
                if self.recorder.called_by_program():  # C++ waits for those of Join
                    self.begun[id(result)] = NotAwaited(name=name, where=self.recorder.where())
        return result

    @before(dist.Work, "wait", "synchronize", "get_future", "is_completed")
    def _wait(self, work: Any, *args: Any, **kwargs: Any) -> None:
        self.begun.pop(id(work), None)

    @on("before_step")
    def _step(self, optimizer: Any) -> None:
        for event in self.begun.values():
            self._lost(event)

    def _lost(self, event: NotAwaited) -> None:
        """Note a collective whose handle was not waited for so far, once for each line."""
        if event.where not in self.told:
            self.told.add(event.where)
            self.recorder.note(event)

    @on("at_end")
    def _end(self) -> None:
        for event in self.begun.values():
            self._never(event)

    def _never(self, event: NotAwaited | None) -> None:
        """Note a collective whose handle no longer exists, or was not waited for until the end, once for each line."""
        if event and event.where not in self.never:
            self.never.add(event.where)
            self._lost(event)
            self.recorder.note(NeverAwaited(name=event.name, where=event.where))

    @around(lambda torch: dtensor(), "full_tensor", named=True)
    def _full(self, name: str, original: Function, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.inside and not self.recorder.quiet:
            ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
            group = ranks if len(ranks) < dist.get_world_size() else ()
            self.note_here(Collective(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype), group=group))
        return original(tensor, *args, **kwargs)

    def _note(self, name: str, arguments: list[object]) -> None:
        tensor = first_tensor(arguments)
        if self.recorder.quiet:
            if tensor is not None and self.recorder.in_backward:  # FSDP gathers layers and reduces their gradients
                self.recorder.note(InnerCollective(name=name, dtype=str(tensor.dtype)))
            return
        if tensor is None:
            tensor = next((each for each in arguments if isinstance(each, torch.Tensor)), None)  # a scalar
        shape = None if tensor is None or name.endswith(("object", "list")) else tuple(tensor.shape)
        dtype = "" if tensor is None else str(tensor.dtype)
        group, inside = _part_of_the_ranks(arguments), self.recorder.in_forward
        self.note_here(Collective(name=name, shape=shape, dtype=dtype, group=group, inside=inside))


def _part_of_the_ranks(arguments: list[object]) -> tuple[int, ...]:
    """The ranks in the group that is an argument of a collective; empty if all ranks are."""
    for each in arguments:
        if isinstance(each, dist.ProcessGroup) and each.size() < dist.get_world_size():
            return tuple(dist.get_process_group_ranks(each))
    return ()
