"""Compare the collectives of the ranks: the first one at which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from workshop.diagnose.evidence import Call, Rank

# All ranks of these give tensors of the same size.
SAME_SIZE = {
    "all_reduce",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "_reduce_scatter_base",
    "_all_gather_base",
}
DEFAULT = ("default_pg", "0", "")


@dataclass(frozen=True)
class Difference:
    """The first collective of a group at which ranks differ.

    Attributes:
        kind: "missing": some ranks never called it; "name", "size", "dtype": they called different ones; "line": they called the
            same one from different lines, and a later one differs.
        number: its number in its group.
        calls: what each rank called; None: nothing.
    """

    kind: Literal["missing", "name", "size", "dtype", "line"]
    number: int
    calls: dict[int, Call | None]

    def ranks(self, called: bool) -> list[int]:
        """Return the ranks that called it, or those that did not."""
        return [rank for rank, call in self.calls.items() if (call is not None) == called]


def first_difference(ranks: Sequence[Rank]) -> Difference | None:
    """Return the first collective at which ranks differ; None: they do not, or nothing is known of their collectives.

    Args:
        ranks: the ranks; those whose collectives are unknown do not count.
    """
    known = [rank for rank in ranks if rank.calls is not None and rank.rank >= 0]
    waiting = [call.group for rank in known if (call := rank.pending())]
    groups = sorted({call.group for rank in known for call in rank.calls or ()}, key=lambda group: group not in waiting)
    for group in groups:
        if difference := _in_group(known, group):
            return difference
    return None


def _in_group(ranks: Iterable[Rank], group: str) -> Difference | None:
    called = {}
    for rank in ranks:
        own = {call.number: call for call in rank.calls or () if call.group == group and not call.peer_to_peer}
        if own or group in DEFAULT:
            called[rank.rank] = own
    if len(called) < 2:
        return None
    # The recorder keeps the last collectives only: begin with the first that all ranks still have.
    first = max((min(own) for own in called.values() if own), default=1)
    last = max((max(own) for own in called.values() if own), default=0)
    by_line: Difference | None = None
    for number in range(first, last + 1):
        calls = {rank: own.get(number) for rank, own in called.items()}
        if kind := _kind(calls.values()):
            # The lines parted earlier, and have differed since: that is where the ranks took different branches.
            return by_line or Difference(kind, number, calls)
        parted = _lines_differ(calls.values())
        by_line = (by_line or Difference("line", number, calls)) if parted else None
    # In a correct program, ranks may make one call from two lines (if rank == 0: ... else: ...), but seldom several in a row.
    return by_line if by_line and by_line.number < last else None


def _kind(calls: Iterable[Call | None]) -> Literal["missing", "name", "size", "dtype"] | None:
    calls = list(calls)
    there = [call for call in calls if call is not None]
    if len({call.name for call in there}) > 1:
        return "name"
    if len(there) < len(calls):
        return "missing"
    if there[0].name in SAME_SIZE:
        if len({call.sizes for call in there}) > 1:
            return "size"
        if len({call.dtypes for call in there}) > 1:
            return "dtype"
    return None


def _lines_differ(calls: Iterable[Call | None]) -> bool:
    lines = {(call.place.file, call.place.line) if call.place else None for call in calls if call is not None}
    return len(lines) > 1
