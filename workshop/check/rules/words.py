"""Words for the sentences of several families of rules."""

from collections.abc import Sequence

from workshop.check.evidence.process import Process


def plural(count: int, word: str) -> str:
    """ "1 step", "2 steps", "2 processes"."""
    return f"{count:,} {word}{'' if count == 1 else (word[-1] in 'xsh' and 'es') or 's'}"


def listed(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def rank_of(ranks: Sequence[Process], index: int) -> int:
    """The rank of a process, or its index in the order of starting if it is in no group."""
    rank = ranks[index].rank
    return index if rank is None else rank


def named(process: Process, otherwise: str = "a process") -> str:
    """ "rank 1", or ``otherwise`` for a process that has joined no group."""
    return otherwise if process.rank is None else f"rank {process.rank}"
