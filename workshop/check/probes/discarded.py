"""Results of collectives that are lost, because they are in a temporary tensor, or overwrite each other."""

import time
import weakref
from collections import Counter
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from workshop.check.evidence.misuses import OutputsShared, ResultDiscarded
from workshop.check.probes.contents import mixed
from workshop.check.probes.probe import Function, Probe, around

ALONE = 2  # references to memory that only one tensor has: that of the tensor, and that of the object that asks
RELEASED = 0.1  # seconds in which the thread of the backend lets go of a tensor; it must not be the last to do so
CALLS = 3  # calls of a line that are recorded


class Discarded(Probe):
    """Records a collective whose tensor ceases to exist in the line of the call, with its memory: nothing reads the result.

    Also one that gets the same tensor for the results of several ranks, such as ``[tensor] * world_size``.
    """

    writes = (ResultDiscarded, OutputsShared)

    def clear(self) -> None:
        self.temporary: dict[int, tuple[weakref.ref[torch.Tensor], ResultDiscarded]] = {}
        self.told = Counter[str]()

    @around(c10d, "all_gather", "gather", named=True)
    def _gather(self, name: str, original: Function, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.guard:
            found = kwargs.get("tensor_list") or kwargs.get("gather_list") or next(filter(_is_list, args), ())
            places = [each.data_ptr() for each in found if isinstance(each, torch.Tensor)]
            places = [place for place in places if place]  # 0: it has no elements, or no memory
            if len(set(places)) < len(places) and self.recorder.called_by_program():
                event = OutputsShared(name=name, where=self.recorder.where())
                if not self.told[event.where]:
                    self.told[event.where] += 1
                    self.recorder.note(event)
        return original(*args, **kwargs)

    @around(c10d, "all_reduce", "broadcast", named=True)
    def _call(self, name: str, original: Function, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        event = None
        with self.recorder.guard:
            by_program = not self.recorder.quiet and self.recorder.called_by_program()
            if by_program and type(tensor) is torch.Tensor and _alone(tensor):
                event = ResultDiscarded(name=name, value=mixed(tensor), where=self.recorder.where())
        uses = tensor._use_count() if event else 0
        result = original(tensor, *args, **kwargs)
        if event and result is None and self.told[event.where] < CALLS:  # a handle: the call is asynchronous
            end = time.monotonic() + RELEASED
            while tensor._use_count() > uses and time.monotonic() < end:
                time.sleep(0.001)
            key = id(tensor)
            self.temporary[key] = weakref.ref(tensor, lambda _: self._ends(key)), event
        return result

    def _ends(self, key: int) -> None:
        """The tensor of a call ceases to exist."""
        with self.recorder.guard:
            _, event = self.temporary.pop(key)
            if self.recorder.where() == event.where:  # otherwise, the program can have read it in the lines between
                self.told[event.where] += 1
                self.recorder.note(event)


def _is_list(argument: object) -> bool:
    return isinstance(argument, list)


def _alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor and no array of NumPy has the memory of a tensor."""
    memory = tensor.untyped_storage()
    return bool(memory.resizable() and torch._C._storage_Use_Count(memory._cdata) == ALONE)
