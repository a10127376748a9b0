"""The trails of two ranks side by side: what differs at a line, and the line from which a value that differs comes."""

import ast
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import PurePath
from typing import NamedTuple

from workshop.check.evidence.events import Collective, Ended
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.trail import ENTRIES, parts
from workshop.check.rules.divergence import Call, call_of
from workshop.check.rules.rule import Seen
from workshop.check.rules.words import named
from workshop.check.source import Statement, changes, sets, statements

FAR = 12  # assignments that are followed
TEXT = 90  # letters of a line
COUNTS = re.compile(r"=.*\blen\(|\.(size|numel|shape)\b")
OF_RANK = ("rank", "main_process", "process_index", "process_zero")  # in the text of what tells ranks apart on purpose
ROOTS = ("src", "dst", "to", "root", "group_src", "group_dst")  # arguments that name a rank
EQUAL_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


class Step(NamedTuple):
    """A line that a process ran."""

    file: int
    depth: int  # number of functions of the program above
    line: int


class Origin(NamedTuple):
    """A value that differs between two ranks."""

    name: str
    values: tuple[str, str]
    where: str  # the line from which it comes; "" if that is unknown
    text: str = ""
    of_rank: bool = False  # it differs because it depends on the number of the rank


class Walk:
    """The trail of a rank, decoded. ``known`` numbers the contexts, that is lines with those of their callers, of all ranks."""

    def __init__(self, process: Process, known: dict[tuple[int, int, int], int]):
        self.process, self.trail = process, process.trail
        self.steps: list[Step] = []
        self.contexts: list[int] = []
        self.returned: set[int] = set()  # the steps after which the function returned
        marks: dict[int, int] = {}
        above: dict[int, int] = {}  # for each depth, the context of its last line
        self.numbers: list[int] = []  # of the entries of the steps
        for number, made in enumerate(self.trail.entries, self.trail.first):
            step = Step(*parts(made))
            if step.file < 0:
                marks[step.line] = len(self.steps)
            elif not step.line:
                self.returned.add(len(self.steps) - 1)
            else:
                context = (above.get(step.depth - 1, 0), step.file, step.line)
                above[step.depth] = known.setdefault(context, len(known) + 1)
                self.contexts.append(above[step.depth])
                self.steps.append(step)
                self.numbers.append(number)
        self.calls: list[tuple[int, Call]] = []  # with the number of steps before each; -1: not in the trail
        for number, (_, event) in enumerate(process.events, 1):
            if call := call_of(event):
                self.calls.append((marks.get(number, -1), call))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def ended(self) -> bool:
        """Whether the process ended by itself."""
        return self.process.first(Ended) is not None

    def latest_at(self, place: str) -> int:
        """The last step at a line such as "train.py:12"; -1: there is none."""
        return next((at for at in range(len(self) - 1, -1, -1) if self.place(at) == place), -1)

    def left(self, at: int) -> bool:
        """Whether the function of a step returned after it."""
        return at in self.returned

    def file(self, at: int) -> str:
        """The file of a step."""
        return self.trail.files[self.steps[at].file]

    def place(self, at: int) -> str:
        """A step as "train.py:12"."""
        return f"{self.file(at)}:{self.steps[at].line}"

    def statement(self, at: int) -> Statement | None:
        """The statement of a step."""
        return _statements(self.trail.sources.get(self.file(at), "")).get(self.steps[at].line)

    def text(self, at: int) -> str:
        """The line of a step as it is in the file."""
        return self.line(self.place(at))

    def line(self, place: str) -> str:
        """A line of a file, such as "train.py:12"."""
        file, _, number = place.rpartition(":")
        lines = self.trail.sources.get(file, "").splitlines()
        text = lines[int(number) - 1].strip() if int(number) <= len(lines) else ""
        return text if len(text) <= TEXT else text[:TEXT] + "..."

    def back(self, at: int, depth: int) -> int:
        """The last step at this depth, at or before a step; -1: there is none."""
        while at >= 0 and self.steps[at].depth > depth:
            at -= 1
        return at if at >= 0 and self.steps[at].depth == depth else -1

    def before(self, at: int) -> list[int]:
        """The earlier steps in the same call of a function, the latest first."""
        found, step, scope = [], self.steps[at], self._scope(at)
        for number in range(at - 1, -1, -1):
            other = self.steps[number]
            if other.depth < step.depth:
                break
            if other.depth == step.depth and other.file == step.file and self._scope(number) == scope:
                found.append(number)
        return found

    def _scope(self, at: int) -> tuple[int, int]:
        statement = self.statement(at)
        return statement.scope if statement else (-1, -1)

    def iterations(self, at: int, statement: Statement) -> list[int]:
        """The steps at which the iterations of a loop began, the last of which is ``at``; empty if the first is unknown."""
        found, end = [at], statement.node.end_lineno or 0
        for number in self.before(at):
            line = self.steps[number].line
            if not statement.first <= line <= end:
                return found[::-1]
            if line == self.steps[at].line:
                found.append(number)
        return [] if len(self.trail.entries) == ENTRIES else found[::-1]

    def goes_on_in(self, at: int, loop: Statement) -> bool:
        """Whether a rank runs the body of a loop after a step at its head, or is still in what gives it the next element."""
        depth, end = self.steps[at].depth, loop.node.end_lineno or 0
        following = next((step for step in self.steps[at + 1 :] if step.depth <= depth), None)
        return following is None or (following.depth == depth and loop.last < following.line <= end)

    def made(self, start: int, stop: int) -> list[tuple[object, str]]:
        """The calls that need all ranks between two steps."""
        return [(call.key, call.where) for at, call in self.calls if start < at <= stop]

    def values(self, at: int) -> dict[str, str]:
        """What the names in a step were, as far as it was noted."""
        return self.trail.values.get(self.numbers[at], {})

    def called(self, at: int) -> dict[str, dict[str, str]]:
        """The functions of libraries that a step called, with their arguments."""
        depth, end = self.steps[at].depth, at + 1
        while end < len(self) and self.steps[end].depth > depth:
            end += 1
        last = self.numbers[end] if end < len(self) else sys.maxsize
        place, found = (self.file(at), self.steps[at].line), dict[str, dict[str, str]]()
        for each in self.trail.calls:
            if each.place == place and self.numbers[at] < each.number <= last:
                found.setdefault(each.name, each.arguments)
        return found


@cache
def _statements(text: str) -> dict[int, Statement]:
    return statements(text)


def differing(one: Walk, other: Walk, at: tuple[int, int], sizes: bool = False) -> list[str]:
    """The names in a statement with different values on two ranks, except the number of the rank.

    Args:
        one: the trail of a rank.
        other: that of a different rank.
        at: the step of each.
        sizes: only the number of elements of a list counts.
    """
    statement = one.statement(at[0])
    mine, theirs = one.values(at[0]), other.values(at[1])
    found = [
        name
        for name in (statement.reads if statement else ())
        if mine.get(name, "") != theirs.get(name, "") and mine.get(name) and theirs.get(name)
    ]
    numbers = (str(one.process.rank), str(other.process.rank))
    found = [name for name in found if (mine[name], theirs[name]) != numbers]
    return [name for name in found if not sizes or _size(mine[name]) != _size(theirs[name])]


def _size(text: str) -> object:
    """The number of elements of a list that is shown in full, else the text."""
    if text.startswith(("[", "(")):
        with suppress(ValueError, SyntaxError):
            return len(ast.literal_eval(text))
    return text


def origin_of(
    one: Walk,
    other: Walk,
    at: tuple[int, int],
    name: str,
    across: bool = True,
    sizes: bool = False,
    to_rank: bool = True,
) -> Origin:
    """Follow a value that differs back to the first line at which it differs.

    Args:
        one: the trail of a rank.
        other: that of a different rank.
        at: the step of each at which the values differ.
        name: the name that has the values.
        across: follow it also into other functions.
        sizes: follow only different numbers of elements; a line that counts them, such as ``steps = len(loader)``, is where the
            ranks must agree, unless a line behind it gives each rank its own part.
        to_rank: follow it also to a line that gives each rank its own part, such as ``mine = data[rank::world_size]``.
    """
    first, values = name, (one.values(at[0]).get(name, ""), other.values(at[1]).get(name, ""))
    place, counted, of_rank = "", "", False
    for _ in range(FAR):
        mine, theirs = last_set(one, at[0], name), last_set(other, at[1], name)
        if mine is None or theirs is None:
            moved = _parameter(one, other, at, name) if across and mine is theirs is None else None
            if moved is None:
                break
            at, name = moved
            continue
        if one.place(mine) != other.place(theirs):
            break
        at = inside(one, other, (mine, theirs)) if across else (mine, theirs)
        text = one.text(at[0]).lower()
        of_rank = any(word in text for word in OF_RANK)
        if of_rank and place and not to_rank:
            of_rank = False
            break
        place = one.place(at[0])
        counted = counted or (place if sizes and COUNTS.search(text) else "")
        following = differing(one, other, at, sizes)
        if not following or place in {event.where for event in one.process.of(Collective)}:
            break
        name = following[0]
    place = place if of_rank else counted or place
    return Origin(first, values, place, one.line(place) if place else "", of_rank)


def last_set(walk: Walk, at: int, name: str) -> int | None:
    """The last step before this one that sets a name, or gives it to a collective."""
    collectives = {event.where for event in walk.process.of(Collective)}
    for number in walk.before(at):
        statement = walk.statement(number)
        if statement and (
            sets(statement.node, name)
            or changes(statement.node, name)
            or (isinstance(statement.node, ast.Expr) and name in statement.reads and walk.place(number) in collectives)
        ):
            return number
    return None


def inside(one: Walk, other: Walk, at: tuple[int, int]) -> tuple[int, int]:
    """The ``return`` of the function that a step calls; if it calls none of the program, the step."""
    mine, theirs = _returned(one, at[0]), _returned(other, at[1])
    same = mine is not None and theirs is not None and one.place(mine) == other.place(theirs)
    return (mine or 0, theirs or 0) if same else at


def _returned(walk: Walk, at: int) -> int | None:
    """The ``return`` of the function of the program that a step calls to set a name."""
    statement, depth = walk.statement(at), walk.steps[at].depth
    node = statement.node if statement else None
    value = node.iter if isinstance(node, (ast.For, ast.AsyncFor)) else getattr(node, "value", None)
    if value is None or not any(isinstance(each, ast.Call) for each in ast.walk(value)):
        return None
    found = None
    for number in range(at + 1, len(walk)):
        if walk.steps[number].depth <= depth:
            break
        if walk.steps[number].depth == depth + 1:
            found = number
    inner = walk.statement(found) if found is not None else None
    return found if inner and isinstance(inner.node, ast.Return) else None


def _parameter(one: Walk, other: Walk, at: tuple[int, int], name: str) -> tuple[tuple[int, int], str] | None:
    """The name in the calling line that has the same values as a parameter."""
    above = (one.back(at[0], one.steps[at[0]].depth - 1), other.back(at[1], other.steps[at[1]].depth - 1))
    if -1 in above or one.place(above[0]) != other.place(above[1]):
        return None
    mine, theirs = one.values(above[0]), other.values(above[1])
    values = (one.values(at[0]).get(name), other.values(at[1]).get(name))
    same = [each for each in mine if (mine[each], theirs.get(each)) == values]
    return (above, same[0]) if same else None


def called_differently(one: Walk, other: Walk, at: tuple[int, int]) -> Seen | None:
    """The argument that differs in a call that both ranks make in the same line."""
    if one.place(at[0]) != other.place(at[1]):
        return None
    mine, theirs = one.called(at[0]), other.called(at[1])
    for name, argument in ((call, each) for call in mine if call in theirs for each in mine[call]):
        values = mine[name][argument], theirs[name].get(argument, "")
        rank = argument in ROOTS and all(value.isdigit() for value in values)
        shape = name in EQUAL_SHAPES and all(value.startswith("a tensor") for value in values)
        if values[0] == values[1] or not (rank or shape):
            continue
        place, more = one.place(at[0]), ""
        origins = (origin_of(one, other, at, each, across=False) for each in differing(one, other, at) if shape)
        if origin := next((origin for origin in origins if origin.where), None):
            place, more = origin.where, f": it comes from {origin.where} (`{origin.text}`)"
        said = f"all ranks call {name} at {one.place(at[0])}, but with different arguments: `{argument}` is {values[0]} on "
        fix = (
            f"Pass the same `{argument}` to {name}() on all ranks."
            if rank
            else f"{name}() needs tensors of the same shape on all ranks: pad them to the largest shape, which "
            "all_reduce() with ReduceOp.MAX finds, or use all_gather_object()."
        )
        return Seen(f"{said}{named(one.process)} and {values[1]} on {named(other.process)}{more}", place, fix=fix)
    return None


def path_of_their_own(run: Run) -> Seen | None:
    """A rank that looks for a file in a folder of its own, while a different rank has written it in a different folder."""
    found = run.elsewhere()
    if found is None:
        return None
    process, raised, other, event = found
    missing = PurePath(re.findall(r"'(.+)'", raised.message)[0])
    written = PurePath(*PurePath(event.path).parts[-len(missing.parts) :])
    seen = (
        f"{named(process)} finds no {missing} ({raised.type}), but {named(other)} has written {written} at {event.where}: "
        "the ranks use different folders"
    )
    where, known = raised.where, dict[tuple[int, int, int], int]()
    one, two = Walk(process, known), Walk(other, known)
    at = one.latest_at(raised.where), two.latest_at(raised.where)
    if -1 not in at:
        for name in differing(one, two, at):
            origin = origin_of(one, two, at, name)
            if origin.where:
                seen += f"; `{name}` comes from {origin.where} (`{origin.text}`)"
                where = origin.where
                break
    fix = "Let one rank choose the name of the folder and send it to the others with broadcast_object_list()."
    return Seen(seen, where, raised.traceback, fix)
