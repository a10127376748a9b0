"""Words about ranks, which all causes share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workshop.diagnose.evidence import Rank

LITTLE = 0.05  # of one core: a process that only waits uses less
SOME_BYTES = 1 << 16  # a process that only waits reads and writes less
BUSY = 0.3  # of one core: more than this is work
SAME_ORDER = "All ranks must call the same collectives in the same order, with the same sizes and types."
# A rank that does one of these has its own reason to wait, even if one of its collectives is not complete.
OWN_REASONS = ("loads", "file", "sleep", "stopped", "child", "joins")


def names(ranks: Iterable[int | Rank]) -> str:
    """Return "rank 1", "ranks 0 and 2", "ranks 0 to 6" or the like."""
    numbers = sorted(rank.rank if isinstance(rank, Rank) else rank for rank in ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    shown = [str(number) for number in numbers[:8]] + (["others"] if len(numbers) > 8 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def verb(ranks: Sequence[object], one: str, many: str) -> str:
    """Return the form of a verb for one rank or for several."""
    return one if len(ranks) == 1 else many


def waits(ranks: Sequence[Rank]) -> str:
    """Return which ranks wait in which call, as a sentence; "": none waits."""
    waiting = [rank for rank in ranks if is_waiting(rank)]
    if not waiting:
        return ""
    return f"{names(waiting).capitalize()} {verb(waiting, 'waits', 'wait')} in {call_words(waiting[0])}."


def call_words(rank: Rank) -> str:
    """Return the call in which a rank waits, with its number if it is known, and its line."""
    pending, at = rank.pending(), rank.doing.place
    if pending and pending.place:
        return str(pending)
    place = f" ({at})" if at else ""
    if pending:
        return f"{pending.name} #{pending.number}" + (
            f" of the backward pass{place}" if rank.doing.what == "the backward pass" else place
        )
    return f"{rank.doing.what}{place}"


def is_waiting(rank: Rank) -> bool:
    """Return whether a rank waits for other ranks in a collective."""
    return rank.alive and (
        rank.doing.kind == "waits" or (rank.pending() is not None and rank.doing.kind not in OWN_REASONS)
    )


def moves(rank: Rank) -> bool:
    """Return whether a rank that waits for no other rank computes, reads or writes, or will wake up from a sleep."""
    if rank.doing.kind in ("computes", "sleep"):
        return True
    changed = rank.before is not None and rank.before.stack != rank.doing.stack
    return rank.busy > LITTLE or rank.transferred > SOME_BYTES or changed
