"""Totals over all ranks that the program sums over all ranks once more."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from workshop.check.evidence.misuses import TotalsSummed
from workshop.check.probes.probe import Function, Probe, around

MOST = 64  # values of a tensor that may be counts
CALLS = 5  # calls in a row after which a total is recorded
CLOSE = 1e-5  # relative difference of equal numbers


class _Last(NamedTuple):
    """The last call of a line."""

    result: list[float]
    more: list[float]  # how much larger the argument was than the result before it
    alike: frozenset[int]  # the values that grew by the same number in all calls in a row
    first: list[float]  # the result of the first call in a row
    calls: int


class Totals(Probe):
    """Records an ``all_reduce`` whose argument is, at each call, its last result and the same number more."""

    writes = (TotalsSummed,)

    def clear(self) -> None:
        self.last: dict[str, _Last] = {}

    @around(c10d, "all_reduce")
    def _call(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        given: list[float] = []
        with self.recorder.guard:
            given = self._values(*args, **kwargs)
        result = original(*args, **kwargs)
        with self.recorder.guard:
            if given:
                self._compare(given, self._values(*args, **kwargs))
        return result

    def _values(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> list[float]:
        """The values of the argument; empty if it can be no count of all ranks."""
        if self.recorder.quiet or async_op or op != dist.ReduceOp.SUM or dist.get_world_size(group) < 2:
            return []
        small = type(tensor) is not torch.nn.Parameter and not tensor.is_complex() and tensor.numel() <= MOST
        return tensor.detach().cpu().double().flatten().tolist() if small else []

    def _compare(self, given: list[float], result: list[float]) -> None:
        where = self.recorder.where()
        last = self.last.get(where)
        if last is None or len(last.result) != len(given):
            self.last[where] = _Last(result, [], frozenset(range(len(given))), result, 1)
            return
        more = [now - before for now, before in zip(given, last.result, strict=True)]
        grown = [
            index
            for index, (now, before) in enumerate(zip(more, last.more or more, strict=False))
            if now > 0 < last.result[index] and math.isclose(now, before, rel_tol=CLOSE * last.result[index] / now)
        ]
        alike = last.alike.intersection(grown)
        if not alike:  # this may be the second call in another row
            self.last[where] = _Last(result, more, frozenset(grown), last.result, 2)
            return
        calls = last.calls + 1
        self.last[where] = _Last(result, more, alike, last.first, calls)
        if calls == CALLS:
            index = min(alike)
            self.recorder.note(TotalsSummed(calls=calls, first=last.first[index], last=result[index], where=where))
