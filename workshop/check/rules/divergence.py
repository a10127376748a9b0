"""Where the ranks first make different calls: the cause of most hangs and lost connections."""

from dataclasses import dataclass
from itertools import combinations

from workshop.check.evidence.events import Backward, Collective, Evaluated, Event, StepBegun, UnevenJoined
from workshop.check.evidence.misuses import ScheduleStepped
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.rules.words import named

AHEAD = 40  # calls after the first difference in which the other rank may make the same call
EVALUATED = ("evaluated",)


@dataclass(frozen=True)
class Call:
    """A call that needs all ranks of a group."""

    key: tuple[object, ...]  # equal for calls that belong together
    text: str  # "all_reduce of [3]"
    where: str
    group: tuple[int, ...] = ()  # empty if it needs all ranks

    def needs(self, process: Process) -> bool:
        """Whether a rank must make this call too."""
        return not self.group or process.rank in self.group


@dataclass(frozen=True)
class Divergence:
    """The first difference between the calls of two ranks."""

    text: str
    where: str


def calls_of(process: Process) -> list[Call]:
    """The calls of a rank that need other ranks, in order."""
    found = (call_of(event) for _, event in process.events)
    return [call for call in found if call]


def call_of(event: Event) -> Call | None:
    """The call that needs other ranks behind an event, if there is one."""
    if isinstance(event, Collective) and not event.point_to_point:
        text = event.name + (f" of {list(event.shape)}" if event.shape else "")
        return Call((event.name, event.common_shape, event.group), text, event.where, event.group)
    if isinstance(event, Backward) and event.forward and event.forward.wrapped and event.sync:
        return Call(("backward",), "backward() of the DDP model", event.where)
    if isinstance(event, Evaluated) and event.forward.wrapped:
        return Call(EVALUATED, "the DDP model without backward()", event.where)
    return None


def first_divergence(run: Run) -> Divergence | None:
    """Where the calls of two ranks first differ; None if one begins with all calls of the other."""
    ranks = [process for process in run.ranks if process.rank is not None]
    if any(process.first(UnevenJoined) for process in ranks):
        return None
    for evaluated in (False, True):  # a DDP model without buffers does not communicate in evaluation
        calls = [[call for call in calls_of(process) if evaluated or call.key != EVALUATED] for process in ranks]
        for (one, mine), (other, theirs) in combinations(zip(ranks, calls, strict=True), 2):
            common = [call for call in mine if call.needs(other)], [call for call in theirs if call.needs(one)]
            if found := _between(one, common[0], other, common[1]):
                return found
    return None


def _between(one: Process, mine: list[Call], other: Process, theirs: list[Call]) -> Divergence | None:
    number = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a.key != b.key), None)
    if number is None:
        return None
    if stray := _stray(mine, theirs, number) or _stray(theirs, mine, number):
        process, rest = (one, other) if stray in mine else (other, one)
        return Divergence(_only(process, stray, rest), stray.where)
    first, second = mine[number], theirs[number]
    usual = {call.key for call in mine[:number]}
    # A call that the other rank makes a little later is not missing there: the rank that has more calls made one too many.
    extra = _extra(mine, theirs, number), _extra(theirs, mine, number)
    if extra[0] != extra[1]:
        process, call, rest = (one, first, other) if extra[0] else (other, second, one)
        return Divergence(_only(process, call, rest), call.where)
    odd = second if first.key in usual and second.key not in usual else first
    text = f"{named(one)} calls {first.text} at {first.where}, but {named(other)} calls {second.text} at {second.where}"
    return Divergence(text, odd.where)


def _only(process: Process, call: Call, rest: Process) -> str:
    return f"only {named(process)} calls {call.text} at {call.where}; {named(rest)} does not"


def _stray(mine: list[Call], theirs: list[Call], number: int) -> Call | None:
    """A call of the first rank that has met a different call of the same kind: then the ranks differ only later.

    The second rank never calls it, the first rank also calls what it has met, and without it the calls agree.
    """
    own, others = ({call.where for call in calls} for calls in (mine, theirs))
    for index in reversed(range(number)):
        if mine[index].where not in others and theirs[index].where in own and _extra(mine, theirs, index):
            return mine[index]
    return None


def _extra(mine: list[Call], theirs: list[Call], number: int) -> bool:
    """Whether the calls agree again without one call of the first rank."""
    follow, there = mine[number + 1 : number + AHEAD], theirs[number : number + AHEAD]
    common = min(len(follow), len(there))
    return common > 0 and [call.key for call in follow[:common]] == [call.key for call in there[:common]]


TO_ONE = (
    "Call all_reduce instead of reduce, so that all ranks get the result, or broadcast what one rank decides with it."
)


def reduced_to_one(process: Process, until: Event | None = None) -> str:
    """The line of a reduce() since the last step before an event (None: the end), if no broadcast sends on what one rank got."""
    where = ""
    for event in collectives_since(process, StepBegun, until):
        if event.name == "reduce" or "broadcast" in event.name:
            where = event.where if event.name == "reduce" else ""
    return where


def decided_by_one(process: Process, until: Event) -> str:
    """The line of such a reduce() before the schedule took its step, which may have decided by the result."""
    where, found = reduced_to_one(process, until), ""
    for _, event in process.events:
        if event is until:
            break
        if isinstance(event, StepBegun):
            found = ""
        elif isinstance(event, Collective) and event.name == "reduce":
            found = event.where
        elif isinstance(event, ScheduleStepped) and found != where:
            where = ""  # it comes after the schedule
    return where


def collectives_since(process: Process, kind: type[Event], until: Event | None = None) -> list[Collective]:
    """The collectives between an event (None: the end) and the last event of a kind before it, without barriers."""
    found: list[Collective] = []
    for _, event in process.events:
        if event is until:
            break
        if isinstance(event, kind):
            found = []
        elif isinstance(event, Collective) and "barrier" not in event.name:
            found.append(event)
    return found
