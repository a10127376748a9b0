"""The process group: how a process joins it, and that it leaves it."""

import os
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from workshop.check.evidence.events import GroupDestroyed, Joined, Joining, StoreOpened
from workshop.check.probes.probe import Function, Probe, around, before


class Groups(Probe):
    """Notes ``init_process_group``, ``destroy_process_group`` and the program's own ``TCPStore``."""

    writes = (Joining, Joined, GroupDestroyed, StoreOpened)
    always = True

    def install(self) -> None:
        super().install()
        # (c10d has no name of its own for it: what a rendezvous of torch opens is not noted.)
        self.patches.set(dist, "TCPStore", self._store(vars(dist)["TCPStore"]))

    @around(dist, "init_process_group")
    @around(c10d, "init_process_group")
    def _init(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.guard:
            self.note_here(
                Joining(
                    init_method=str(kwargs.get("init_method") or (args[1] if len(args) > 1 else None)),
                    world_size=_plain(kwargs.get("world_size", os.environ.get("WORLD_SIZE"))),
                    address=os.environ.get("MASTER_ADDR"),
                    port=os.environ.get("MASTER_PORT"),
                    given_address=self.recorder.environment.get("MASTER_ADDR"),
                    given_port=self.recorder.environment.get("MASTER_PORT"),
                )
            )
        result = original(*args, **kwargs)
        with self.recorder.guard:
            self.note_here(Joined(rank=dist.get_rank(), world_size=dist.get_world_size()))
        return result

    @before(dist, "destroy_process_group")
    @before(c10d, "destroy_process_group")
    def _destroy(self, *args: Any, **kwargs: Any) -> None:
        self.note_here(GroupDestroyed())

    def _store(self, original: type[Any]) -> type[Any]:
        recorder = self.recorder

        class TCPStore(original):  # type: ignore[misc]  # mypy does not follow a class that is an argument
            """The store, noted when it is made. A class, so that the program can ask for it with isinstance()."""

            def __init__(self, host_name: Any, port: Any, *args: Any, **kwargs: Any) -> None:
                with recorder.guard:
                    master = kwargs.get("is_master", args[1] if len(args) > 1 else False)
                    recorder.note(StoreOpened(port=int(port), master=bool(master)))
                super().__init__(host_name, port, *args, **kwargs)

        TCPStore.__module__, TCPStore.__qualname__ = original.__module__, original.__qualname__
        return TCPStore


def _plain(value: object) -> object:
    """The value, or its text where it may not be readable elsewhere."""
    return value if isinstance(value, (int, str)) or value is None else str(value)
