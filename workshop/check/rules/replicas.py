"""At which line the parameters of a model, which are equal on all ranks, become different (see ``probes/replicas.py``)."""

import ast
from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

from workshop.check.evidence.events import Collective, Wrapped
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.evidence.trail import Change
from workshop.check.rules.rule import Seen
from workshop.check.rules.walk import FAR, Walk, differing, last_set
from workshop.check.rules.words import named, plural

SAME = (
    "Change parameters on all ranks in the same way: reduce the values that they depend on with all_reduce() before, or "
    "broadcast() the parameters of one rank after the change."
)
DECIDE = (
    "Change the model on all ranks at the same time: let them decide by a value that is the same on all ranks, such as the "
    "number of optimizer steps, or broadcast() the decision of one rank."
)


class Parted(NamedTuple):
    """Where replicas become different."""

    text: str
    where: str
    fix: str
    origin: str = "here"

    def added_to(self, seen: str) -> Seen:
        """What was seen, with the line of the cause."""
        return Seen(seen + self.text, self.where, fix=self.fix, origin=self.origin)


def parted(run: Run, where: str, buffers: bool = False) -> Parted | None:
    """Where the parameters, or the buffers, of the model that a line uses become different; None: unknown."""
    ranks = [process for process in run.ranks if process.replica.changes]
    for other in ranks[1:]:
        mine, theirs = (_history(process, where, buffers) for process in (ranks[0], other))
        found = next((pair for pair in zip(mine, theirs, strict=False) if _apart(pair[0][-1], pair[1][-1])), None)
        if found and (said := _between((ranks[0], other), *found, buffers)):
            return said
    return None


def begun_apart(run: Run, where: str) -> Parted | None:
    """Where the parameters of the model that a line uses last change before the first step, if they have never been equal."""
    ranks = [process for process in run.ranks if process.replica.changes]
    for other in ranks[1:]:
        mine, theirs = (next(_history(process, where, False), []) for process in (ranks[0], other))
        early = [pair for pair in zip(mine[:-1], theirs[:-1], strict=False) if not pair[0].steps and pair[0].places]
        if early and all(_apart(*pair) for pair in early) and early[-1][0].places == early[-1][1].places:
            place = early[-1][0].places[0][0]
            return Parted(f"; they differ already after {place}", place, "")
    return None


def _history(process: Process, where: str, buffers: bool) -> Iterator[list[Change]]:
    """Yield for each use of a model in a line the changes of this model before it, and the use."""
    changes = [each._replace(sketches=each.buffers) if buffers else each for each in process.replica.changes]
    for at, each in enumerate(changes):
        if each.what == "used" and each.places and each.places[0][0] == where:
            yield [*(old for old in changes[:at] if old.model == each.model and old.what == "changed"), each]


def _apart(one: Change, other: Change) -> bool:
    return one.model == other.model and difference(one.sketches, other.sketches) > CLOSE


def _between(ranks: tuple[Process, Process], mine: list[Change], theirs: list[Change], buffers: bool) -> Parted | None:
    """What to say about the first change after which two replicas are different."""
    pairs = list(zip(mine[:-1], theirs[:-1], strict=False))
    equal = [at for at, (one, other) in enumerate(pairs) if not _apart(one, other)]
    if not equal:
        return None  # they were never equal: the rule says how they begin
    at = equal[-1] + 1
    one, other = mine[at : at + 1], theirs[at : at + 1]
    # With DistributedDataParallel the ranks step together, so the number of steps is a common clock.
    timed = ranks[0].first(Wrapped) is not None
    if len(pairs) > at and one[0].places == other[0].places and (one[0].steps == other[0].steps or not timed):
        return _in_line(ranks, (mine[at - 1], theirs[at - 1]), (one[0], other[0]), None if buffers else mine[-1])
    return _apart_in_time(ranks, one, other)


def _apart_in_time(ranks: tuple[Process, Process], one: list[Change], other: list[Change]) -> Parted | None:
    """What to say if one rank changes its replica, and the other one later, elsewhere or not at all."""
    found = [
        (each.steps, each.places[0][0], process)
        for process, changes in zip(ranks, (one, other), strict=True)
        for each in changes
        if each.what == "changed" and each.places
    ]
    if not found:
        return None
    (steps, place, process), *later = sorted(found, key=lambda each: each[0])
    idle = ranks[1] if process is ranks[0] else ranks[0]
    said = f"; after {plural(steps, 'step')} {named(process)} changes them at {place}, and {named(idle)} "
    said += f"at {later[0][1]} after {plural(later[0][0], 'step')}" if later else "does not"
    return Parted(said, place, DECIDE, "gate here")


def _in_line(
    ranks: tuple[Process, Process], before: tuple[Change, Change], after: tuple[Change, Change], use: Change | None
) -> Parted | None:
    """What to say about a line that both ranks run, and after which the parameters are different.

    ``use``: of the functions that run at that moment, the one that also leads to this use of the model is that of the training,
    and its line is named; None: the line that changes the tensors.
    """
    if not after[0].places or (use and after[0].places[0][0] == use.places[0][0]):
        return None  # the step itself, which the rule names anyway
    using = {_function(each) for each in use.places} if use else {_function(after[0].places[0])}
    common = [each[0] for each in after[0].places if _function(each) in using]
    inner, place = after[0].places[0][0], (common or [after[0].places[-1][0]])[0]
    known: dict[tuple[int, int, int], int] = {}
    walks = [_walk(process, known) for process in ranks]
    at = [_at(walk, each.number, place) for walk, each in zip(walks, after, strict=True)]
    said = f"; they differ after {place} (`{walks[0].line(place)}`)"
    said += f", which changes them at {inner}" if inner != place else ""
    if -1 in at:
        return Parted(said, place, SAME, "hook here")
    since = [_at(walk, each.number) for walk, each in zip(walks, before, strict=True)]
    source = _own_value(walks[0], walks[1], (at[0], at[1]), (since[0], since[1]))
    if source == place and walks[0].line(f"{inner.rpartition(':')[0]}:{after[0].places[0][1]}").startswith(
        "def forward("
    ):
        return Parted(said, inner, SAME)
    if source != place:
        said += f"; the different values come from {source} (`{walks[0].line(source)}`)"
    return Parted(said, source, SAME, "hook here")


def _function(place: tuple[str, int, int]) -> tuple[str, int, int]:
    """The function of a line: its file, and its first and last line."""
    return place[0].rpartition(":")[0], place[1], place[2]


def _walk(process: Process, known: dict[tuple[int, int, int], int]) -> Walk:
    traced = copy(process)
    traced.trail = process.replica
    return Walk(traced, known)


def _at(walk: Walk, number: int, place: str = "") -> int:
    """The last step before an entry, at a place; -1: there is none."""
    for at in range(len(walk) - 1, -1, -1):
        if walk.numbers[at] < number and place in ("", walk.place(at)):
            return at
    return -1


def _own_value(one: Walk, other: Walk, at: tuple[int, int], since: tuple[int, int]) -> str:
    """The first line after the last exchange that uses a value which is not the same on two ranks.

    Without an exchange ``since`` the parameters were equal, it is the line ``at`` which they become different; if this only
    copies a variable, the line that computes the variable.
    """
    exchanges = {event.where for event in one.process.of(Collective) if "barrier" not in event.name}
    floors = []
    for walk, start, stop in zip((one, other), since, at, strict=True):
        floors.append(next((each for each in range(stop - 1, start, -1) if walk.place(each) in exchanges), -1))
    if -1 in floors:
        statement = one.statement(at[0])
        copied = getattr(statement.node, "value", None) if statement else None
        computed = last_set(one, at[0], copied.id) if isinstance(copied, ast.Name) else None
        return one.place(at[0] if computed is None else computed)
    for _ in range(FAR):
        sets = ((last_set(one, at[0], name), last_set(other, at[1], name)) for name in differing(one, other, at))
        moved = next(
            (
                (mine, theirs)
                for mine, theirs in sets
                if mine is not None and theirs is not None and mine > floors[0] and theirs > floors[1]
            ),
            None,
        )
        if moved is None or one.place(moved[0]) != other.place(moved[1]):
            break
        at = moved
    return one.place(at[0])
