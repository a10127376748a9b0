"""Where the ranks parted: the branch, the loop or the argument behind a hang, a lost connection or different calls."""

import ast
import re
from itertools import combinations, permutations
from typing import NamedTuple

from workshop.check.evidence.events import BatchLoaded, LoaderStarted, UnevenJoined
from workshop.check.evidence.misuses import PassEnded
from workshop.check.evidence.run import Run
from workshop.check.rules.divergence import EVALUATED, TO_ONE, Call, reduced_to_one
from workshop.check.rules.rule import Seen
from workshop.check.rules.walk import Origin, Walk, called_differently, differing, inside, origin_of
from workshop.check.rules.words import named, plural
from workshop.check.source import Statement

AHEAD = 5000  # lines in which the ranks may come together again
LOOPS = (ast.For, ast.AsyncFor, ast.While)
BATCHES = (
    "Give all ranks the same number of iterations of this loop: divide the data after filtering and packing it, and use "
    "DistributedSampler or drop_last=True, or take the smallest number of all ranks (all_reduce with ReduceOp.MIN)."
)
DECIDE = (
    "All ranks must take the same branch before a collective. Let one rank decide and broadcast() the decision, or "
    "all_reduce() the value that it depends on; or move the collectives out of the branch."
)

ONE_ONLY = "; before that, reduce() at {} gave its result to one rank only"
OF_RANK = re.compile(r"rank|main_process|global_zero", re.IGNORECASE)


class _Fork(NamedTuple):
    """Where two ranks part: the last common step of each, and the next one; None: it runs no further line."""

    last: tuple[int, int]
    next: tuple[int | None, int | None]


class _Then(NamedTuple):
    """The calls that need all ranks and that two ranks do not make together."""

    text: str
    wheres: list[str]  # their lines


def parting(run: Run) -> Seen | None:
    """Return where two ranks part before the first call that only one of them makes; None if there are no trails of them."""
    ranks = [process for process in run.ranks if process.rank is not None and process.trail.entries]
    if any(process.first(UnevenJoined) for process in run.ranks):
        return None
    known: dict[tuple[int, int, int], int] = {}
    walks = [Walk(process, known) for process in ranks]
    for evaluated in (False, True):  # a DDP model without buffers does not communicate in evaluation
        for one, other in combinations(walks, 2):
            if found := _between(one, other, evaluated):
                return found
    return _ended_early(run)


def _ended_early(run: Run) -> Seen | None:
    """A loader of training samples that has ended on one rank, while a different one has got a further batch from it."""
    for process, other in permutations(run.trained, 2):
        for ended in process.of(PassEnded):
            begun = [number for number, (_, event) in enumerate(other.events) if isinstance(event, LoaderStarted)]
            started = other.events[begun[-1]][1] if begun else None
            same = isinstance(started, LoaderStarted) and started.loader == ended.loader
            if not isinstance(started, LoaderStarted) or not same or started.iteration != ended.iteration:
                continue
            loaded = sum(isinstance(event, BatchLoaded) for _, event in other.events[begun[-1] :])
            if loaded > ended.batches and (started.loader, started.iteration) in other.passes:
                after = f"{ended.batches} batches of the training loader"
                seen = f"{named(process)} ends after {after}, but {named(other)} gets a further one"
                return Seen(seen, started.source or started.where, fix=BATCHES, origin="stream dealt loader")
    return None


def _between(one: Walk, other: Walk, evaluated: bool) -> Seen | None:
    mine, theirs = ([(at, c) for at, c in walk.calls if evaluated or c.key != EVALUATED] for walk in (one, other))
    number = next((n for n, ((_, a), (_, b)) in enumerate(zip(mine, theirs, strict=False)) if a.key != b.key), None)
    number = min(len(mine), len(theirs)) if number is None else number
    while number and _apart(one, mine[number - 1], other, theirs[number - 1]):
        number -= 1
    starts = [calls[number - 1][0] if number else 0 for calls in (mine, theirs)]
    stops = [calls[number][0] if number < len(calls) else len(walk) for walk, calls in ((one, mine), (other, theirs))]
    if -1 in starts or -1 in stops:
        return None  # so long ago that the trail does not contain it
    fork = _fork(one, other, starts, stops)
    if fork is None:
        return None
    fork = _of_caller(one, other, fork, stops)
    said = [f"{named(walk.process)} {_then(walk, calls, number)}" for walk, calls in ((one, mine), (other, theirs))]
    wheres = [calls[number][1].where for calls in (mine, theirs) if number < len(calls)]
    together = len(wheres) == 2 and mine[number][1] == theirs[number][1]  # it looks like the same call
    then = _Then("" if together else "; then " + " and ".join(said), wheres)
    return _branch(one, other, fork, then) or called_differently(one, other, fork.last)


def _then(walk: Walk, calls: list[tuple[int, Call]], number: int) -> str:
    if number < len(calls):
        return f"calls {calls[number][1].text} at {calls[number][1].where}"
    return "ends" if walk.ended else f"waits at {walk.place(len(walk) - 1)}"


def _apart(one: Walk, mine: tuple[int, Call], other: Walk, theirs: tuple[int, Call]) -> bool:
    """Whether two calls that look alike come from different lines, so that the ranks had parted before."""
    steps = one.contexts[mine[0] - 1 : mine[0]], other.contexts[theirs[0] - 1 : theirs[0]]
    return mine[1].where != theirs[1].where or (bool(steps[0] and steps[1]) and steps[0] != steps[1])


def _fork(one: Walk, other: Walk, starts: list[int], stops: list[int]) -> _Fork | None:
    """Follow two ranks from ``starts`` until they part and do not come together again before ``stops``."""
    i, j = starts
    last = (i - 1, j - 1) if i and j else None
    while i < stops[0] and j < stops[1]:
        if one.contexts[i] == other.contexts[j]:
            last = (i, j)
            i, j = i + 1, j + 1
            continue
        again = _together(one.contexts[i : min(stops[0], i + AHEAD)], other.contexts[j : min(stops[1], j + AHEAD)])
        if again is None:
            break
        i, j = i + again[0], j + again[1]
    return last and _Fork(last, (i if i < stops[0] else None, j if j < stops[1] else None))


def _of_caller(one: Walk, other: Walk, fork: _Fork, stops: list[int]) -> _Fork:
    """The same parting in the caller, if both ranks have left the function since then, such as is_main_process()."""
    depth = one.steps[fork.last[0]].depth
    if fork.next[0] is None or fork.next[1] is None:
        return fork
    after = tuple(
        next((at for at in range(start, stop) if walk.steps[at].depth < depth), None)
        for walk, start, stop in ((one, fork.next[0], stops[0]), (other, fork.next[1], stops[1]))
    )
    callers = one.back(fork.last[0], depth - 1), other.back(fork.last[1], depth - 1)
    if None in after or -1 in callers or one.contexts[callers[0]] != other.contexts[callers[1]]:
        return fork
    return _of_caller(one, other, _Fork(callers, (after[0], after[1])), stops)


def _together(mine: list[int], theirs: list[int]) -> tuple[int, int] | None:
    """The first position in each list at which both have the same, with the fewest left out before it."""
    first: dict[int, int] = {}
    for position, each in enumerate(theirs):
        first.setdefault(each, position)
    found = [(position, first[each]) for position, each in enumerate(mine) if each in first]
    return min(found, key=sum, default=None)


def _branch(one: Walk, other: Walk, fork: _Fork, then: _Then) -> Seen | None:
    """The statement after which the ranks run different lines."""
    following = [walk.steps[at] for walk, at in zip((one, other), fork.next, strict=True) if at is not None]
    stuck = any(
        at is None and not walk.left(last) for walk, at, last in zip((one, other), fork.next, fork.last, strict=True)
    )
    if not following or (stuck and not _loops(one, fork)):
        return None
    depth = min(max(step.depth for step in following), one.steps[fork.last[0]].depth)
    at = (one.back(fork.last[0], depth), other.back(fork.last[1], depth))
    if -1 in at:
        return None
    statement = one.statement(at[0])
    if statement and isinstance(statement.node, LOOPS):
        return _loop(one, other, at, fork, statement, then)
    return _way(one, other, at, fork, statement, then)


def _loops(walk: Walk, fork: _Fork) -> bool:
    statement = walk.statement(fork.last[0])
    return statement is not None and isinstance(statement.node, (ast.If, *LOOPS))


def _way(one: Walk, other: Walk, at: tuple[int, int], fork: _Fork, statement: Statement | None, then: _Then) -> Seen:
    """What to say about an ``if``, or a different statement."""
    line, text = one.steps[at[0]].line, one.text(at[0])
    ways = [
        f"{named(walk.process)} "
        + ("runs no line after it" if following is None else f"goes to {walk.place(following)}")
        for walk, following in zip((one, other), fork.next, strict=True)
    ]
    seen = f"the ranks diverge at line {line} (`{text}`): {ways[0]}, {ways[1]}"
    where, why, fix = one.place(at[0]), "", DECIDE
    if statement and isinstance(statement.node, (ast.If, ast.While)):
        origin = _decided_by(one, other, at, statement)
        why = _because(one, other, origin) if origin else ""
        if origin and not _compares(statement.node.test, origin.name):
            where = origin.where or where
        elif reduced := "" if origin else _reduced(one, other, statement.node.test):
            why, where, fix = ONE_ONLY.format(reduced), reduced, TO_ONE
        body = {f"{one.file(at[0])}:{line}" for line in range(statement.last + 1, (statement.node.end_lineno or 0) + 1)}
        in_it = [each for each in then.wheres if each in body]
        if origin is None and fix == DECIDE and len(in_it) == 1:
            where = in_it[0]  # the branch is for some ranks on purpose, so the call must move
    return Seen(seen + then.text + why, where, fix=fix)


def _loop(one: Walk, other: Walk, at: tuple[int, int], fork: _Fork, statement: Statement, then: _Then) -> Seen | None:
    """What to say about a loop that one rank leaves earlier, or about an iteration in which the ranks make different calls."""
    iterations = one.iterations(at[0], statement), other.iterations(at[1], statement)
    for mine, theirs in zip(
        zip(iterations[0], iterations[0][1:], strict=False),
        zip(iterations[1], iterations[1][1:], strict=False),
        strict=False,
    ):
        if one.made(*mine) != other.made(*theirs):
            inner = _fork(one, other, [mine[0], theirs[0]], [mine[1], theirs[1]])
            if inner and inner.last != at and (found := _branch(one, other, inner, then)):
                return found
            break
    within = [
        following is not None and walk.goes_on_in(last, statement)
        for walk, following, last in zip((one, other), fork.next, at, strict=True)
    ]
    if within[0] == within[1]:
        return _way(one, other, at, fork, statement, then)
    leaves, goes = (other, one) if within[0] else (one, other)
    number = len(iterations[0 if leaves is one else 1]) - 1
    counted = (
        f"after {plural(number, 'iteration')} on {{}}, but {{}} begins iteration {number + 1}"
        if number >= 0
        else "on {}, not on {}"
    )
    origin = _decided_by(one, other, at, statement) or _looped_over(one, other, iterations)
    seen = (
        f"the loop at line {one.steps[at[0]].line} (`{one.text(at[0])}`) ends "
        f"{counted.format(named(leaves.process), named(goes.process))}{then.text}"
    )
    where = (origin and origin.where) or one.place(at[0])
    fix = DECIDE if isinstance(statement.node, ast.While) else BATCHES
    test = statement.node.test if isinstance(statement.node, ast.While) and origin is None else None
    if test and (reduced := _reduced(one, other, test)):
        return Seen(seen + ONE_ONLY.format(reduced), reduced, fix=TO_ONE)
    return Seen(
        seen + (_because(one, other, origin) if origin else ""), where, fix=fix, origin="" if origin else "dealt"
    )


def _reduced(one: Walk, other: Walk, test: ast.expr) -> str:
    """The line of a reduce() after the last step, whose result only one rank has, if a condition does not ask for the rank."""
    lines = {reduced_to_one(walk.process) for walk in (one, other)}
    return lines.pop() if len(lines) == 1 and not OF_RANK.search(ast.unparse(test)) else ""


def _compares(test: ast.expr, name: str) -> bool:
    """Whether a condition compares a variable with something: then this line makes the decision."""
    return any(
        isinstance(each, ast.Compare) and any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(each))
        for each in ast.walk(test)
    )


def _decided_by(one: Walk, other: Walk, at: tuple[int, int], statement: Statement) -> Origin | None:
    """The value that makes two ranks take different ways, and where it comes from."""
    by_rank = isinstance(statement.node, (ast.If, ast.While))
    for name in differing(one, other, at, sizes=not by_rank):
        origin = origin_of(one, other, at, name, sizes=not by_rank, to_rank=not by_rank)
        if not (by_rank and origin.of_rank):
            return origin
    return None


def _looped_over(one: Walk, other: Walk, iterations: tuple[list[int], list[int]]) -> Origin | None:
    """The line of the function of the program that returns what a loop runs over."""
    if not iterations[0] or not iterations[1]:
        return None
    at = inside(one, other, (iterations[0][0], iterations[1][0]))
    if at[0] == iterations[0][0]:
        return None
    origins = (origin_of(one, other, at, name, sizes=True) for name in differing(one, other, at, sizes=True))
    returned = Origin("", ("", ""), one.place(at[0]), one.text(at[0]))
    return next((origin for origin in origins if origin.where), returned)


def _because(one: Walk, other: Walk, origin: Origin) -> str:
    if not origin.name:
        return f"; what it runs over comes from {origin.where} (`{origin.text}`)"
    values = f"`{origin.name}` is {origin.values[0]} on {named(one.process)} and {origin.values[1]} on {named(other.process)}"
    return f"; {values}" + (f": it comes from {origin.where} (`{origin.text}`)" if origin.where else "")
