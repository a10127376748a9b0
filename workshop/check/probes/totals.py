"""Totals over all ranks that the program sums over all ranks once more."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from workshop.check.evidence.misuses import TotalsSummed
from workshop.check.probes.probe import Function, Probe, around

MOST = 64  # values of a tensor that may be counts
CALLS = 4  # calls in a row after which a total is recorded
CHAINS = 16  # of calls of a line that are followed
AGAIN = 3  # calls with the same tensor after which it is
CLOSE = 1e-5  # relative difference of equal numbers
MORE = 1.5  # at least how many times a total becomes larger if two or more ranks add it up once more


class _Last(NamedTuple):
    """The last call of a line."""

    result: list[float]
    more: list[float]  # how much larger the argument was than the result before it
    alike: frozenset[int]  # the values that grew by the same number in all calls in a row
    first: list[float]  # the result of the first call in a row
    calls: int
    number: int  # of all calls of the line until then
    apart: int  # the calls of the line since the one before in this row; 0: this is the first


class _Kept(NamedTuple):
    """The tensor of the last call of a line."""

    tensor: Callable[[], torch.Tensor | None]  # a weak reference
    result: list[float]
    times: int  # that it came again with its last result, and a count more


class Totals(Probe):
    """Records an ``all_reduce`` whose argument is, at each call, its last result and the same number more.

    Of the same tensor, a number that is a count is enough.
    """

    writes = (TotalsSummed,)

    def clear(self) -> None:
        self.last: dict[str, list[_Last]] = {}
        self.calls = Counter[str]()
        self.told: set[str] = set()  # the lines that are recorded
        self.kept: dict[str, _Kept] = {}
        self.reused: set[str] = set()  # lines whose tensor gets other values before each call

    @around(c10d, "all_reduce")
    def _call(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        given: list[float] = []
        with self.recorder.guard:
            given = self._values(*args, **kwargs)
            if given:
                self._compare_kept(args[0] if args else kwargs["tensor"], given)
        result = original(*args, **kwargs)
        with self.recorder.guard:
            if given:
                values, where = self._values(*args, **kwargs), self.recorder.where()
                self._compare(given, values)
                self.kept[where] = self.kept[where]._replace(result=values)
        return result

    def _values(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> list[float]:
        """The values of the argument; empty if it can be no count of all ranks."""
        if self.recorder.quiet or async_op or op != dist.ReduceOp.SUM or dist.get_world_size(group) < 2:
            return []
        small = type(tensor) is not torch.nn.Parameter and not tensor.is_complex() and tensor.numel() <= MOST
        return tensor.detach().cpu().double().flatten().tolist() if small else []

    def _compare_kept(self, tensor: torch.Tensor, given: list[float]) -> None:
        where = self.recorder.where()
        last = self.kept.get(where)
        times = last.times if last else 0
        if last and last.tensor() is tensor and any(last.result) and given != last.result:
            pairs = list(zip(given, last.result, strict=True))
            counts = [pair for pair in pairs if pair[0] > pair[1] > 0 and all(each.is_integer() for each in pair)]
            if not counts or any(0 < before > now for now, before in pairs):
                self.reused.add(where)
            else:
                times += 1
            if times == AGAIN and where not in self.reused:
                now, before = counts[0]
                self._tell(TotalsSummed(calls=times + 1, first=before, last=now, where=where))
        self.kept[where] = _Kept(ref(tensor), [], times)

    def _tell(self, event: TotalsSummed) -> None:
        if event.where not in self.told:
            self.told.add(event.where)
            self.recorder.note(event)

    def _compare(self, given: list[float], result: list[float]) -> None:
        where = self.recorder.where()
        self.calls[where] += 1
        chains, number = self.last.setdefault(where, []), self.calls[where]  # several meters may call a line in turn
        for last in chains if given else ():
            if len(last.result) == len(given) and (following := _following(last, given, result, number)):
                chains.remove(last)
                chains.append(following)
                if following.calls == CALLS:
                    index = min(following.alike)
                    first = following.first[index]
                    self._tell(TotalsSummed(calls=CALLS, first=first, last=result[index], where=where))
                return
        chains.append(_Last(result, [], frozenset(range(len(given))), result, 1, number, 0))
        del chains[:-CHAINS]


def _following(last: _Last, given: list[float], result: list[float], number: int) -> _Last | None:
    """The call of a line that follows on a different one, if its argument is the result before and the same numbers more.

    Calls in a row are equally far apart: a count of this rank alone can be as large as earlier totals now and then.
    """
    apart = number - last.number
    if last.apart not in (0, apart):
        return None
    more = [now - before for now, before in zip(given, last.result, strict=True)]
    grown = [
        index
        for index, (now, before) in enumerate(zip(more, last.more or more, strict=False))
        if now > 0 < last.result[index]
        and result[index] > MORE * last.result[index]
        and math.isclose(now, before, rel_tol=CLOSE * last.result[index] / now)
    ]
    alike = last.alike.intersection(grown)
    return _Last(result, more, alike, last.first, last.calls + 1, number, apart) if alike else None
