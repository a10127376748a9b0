"""Find in the text of a program where it stops early: a value has not improved several times in a row, or reaches a limit."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

# From the count to a flag, to a function that returns it, to a variable with its result, to the end of the loop.
ROUNDS = 4
# The ranks tell each other what they decide.
TOLD = re.compile(r"reduce|broadcast|gather|tensor|scatter|trigger|^sync|^send", re.IGNORECASE)
COUNTS = re.compile(r"\+=\s*1|\+ 1\b")  # a file without such a text needs no reading
LARGER = ast.Lt, ast.LtE, ast.Gt, ast.GtE


class Stop(NamedTuple):
    """A comparison by which a program decides whether a value has improved, or is good enough."""

    file: str
    line: int
    compared: tuple[str, ...]  # the last parts of the names that are compared, such as "best_loss" of "state.best_loss"


def early_stops(texts: Mapping[str, str]) -> Iterator[Stop]:
    """Yield the comparisons after which each rank alone ends a loop; ``texts``: the text of each file of the program."""
    trees = {name: ast.parse(text) for name, text in texts.items() if COUNTS.search(text)}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and any(_ends_a_loop(trees, counter) for counter in _counted(node)):
                yield Stop(name, node.lineno, tuple(sorted(_names(node.test))))


def stops_at_limits(texts: Mapping[str, str], running: Mapping[str, Iterable[int]]) -> Iterator[Stop]:
    """Yield the comparisons of a value with a limit after which each rank alone ends a loop around the running lines of a file.

    Here ``compared`` has whole names, such as "state.loss".
    """
    for name, lines in running.items():
        tree = ast.parse(texts.get(name, ""))
        for node in ast.walk(tree):
            if isinstance(node, ast.For | ast.While) and any(node.lineno <= each <= _end(node) for each in lines):
                yield from (Stop(name, *each) for each in _limits(tree, node))


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _limits(tree: ast.Module, loop: ast.For | ast.While) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the line and the names of the comparisons of a value with a limit that end this loop."""
    inner = list(_own_statements(loop.body))
    flags = {
        target.id: each
        for each in inner
        if isinstance(each, ast.Assign) and not isinstance(each.value, ast.Call)
        for target in each.targets
        if isinstance(target, ast.Name) and _compared(each.value)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and TOLD.search(_name(node.func))]
    told = {name for call in calls for each in ast.walk(call) for name in {_name(each)} if each is not call.func}
    ends: list[tuple[int, ast.expr]] = [(loop.lineno, loop.test)] if isinstance(loop, ast.While) else []
    ends += [(each.lineno, each.test) for each in inner if isinstance(each, ast.If) and _breaks(each)]
    for line, test in ends:
        if names := _compared(test):
            yield line, names
        for flag in sorted(_names(test) & flags.keys() - told):
            yield flags[flag].lineno, _compared(flags[flag].value)


def _own_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a loop without those of loops and functions in it."""
    for each in body:
        yield each
        if isinstance(each, ast.If | ast.With | ast.Try):
            parts = (each.body, getattr(each, "orelse", []), getattr(each, "finalbody", []))
            yield from (inner for part in parts for inner in _own_statements(part))


def _breaks(node: ast.If) -> bool:
    return any(isinstance(each, ast.Break) for each in _own_statements(node.body))


def _compared(test: ast.expr) -> tuple[str, ...]:
    """The names that an expression compares by their size."""
    found = (each for each in ast.walk(test) if isinstance(each, ast.Compare) and isinstance(each.ops[0], LARGER))
    parts = (part for each in found for part in ast.walk(each) if isinstance(part, ast.Name | ast.Attribute))
    return tuple(sorted({ast.unparse(part) for part in parts}))


def _counted(node: ast.If) -> set[str]:
    """The variables that one branch of a comparison increases, and that the other one sets to 0."""
    compares = any(isinstance(each, ast.Compare) and isinstance(each.ops[0], LARGER) for each in ast.walk(node.test))
    if not compares:
        return set()
    parts = [[each for one in branch for each in ast.walk(one)] for branch in (node.body, node.orelse)]
    (up, zero), (up_else, zero_else) = ((_increased(part), _reset(part)) for part in parts)
    return (up & zero_else) | (up_else & zero)


def _increased(nodes: list[ast.AST]) -> set[str]:
    return {_name(each.target) for each in nodes if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add)}


def _reset(nodes: list[ast.AST]) -> set[str]:
    found: set[str] = set()
    for each in nodes:
        if isinstance(each, ast.Assign):
            for target in each.targets:
                pairs: list[tuple[ast.expr, ast.expr]] = [(target, each.value)]
                if isinstance(target, ast.Tuple) and isinstance(each.value, ast.Tuple):
                    pairs = list(zip(target.elts, each.value.elts, strict=False))
                found |= {_name(one) for one, value in pairs if isinstance(value, ast.Constant) and value.value == 0}
    return found


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _names(node: ast.AST) -> set[str]:
    return {_name(each) for each in ast.walk(node)} - {""}


class _Decision:
    """Where a decision goes: variables, and functions that return it."""

    def __init__(self, counter: str) -> None:
        self.counter = counter
        self.flags: set[str] = set()
        self.functions: set[str] = set()

    def within(self, node: ast.AST | None) -> bool:
        """Whether an expression contains the decision."""
        for each in ast.walk(node) if node else ():
            compares = isinstance(each, ast.Compare) and self.counter in _names(each)
            if compares or _name(each) in self.flags or (isinstance(each, ast.Call) and self._returned(each)):
                return True
        return False

    def _returned(self, call: ast.Call) -> bool:
        name, text = _name(call.func), ast.unparse(call.func).lower()
        return (name in self.functions and name != "step") or (
            "stop" in text and bool({name, "__call__"} & self.functions)
        )


def _ends_a_loop(trees: Mapping[str, ast.Module], counter: str) -> bool:
    """Whether a count decides about the end of a loop, and no rank hears of the decision of another one."""
    decision, ends = _Decision(counter), False
    placed = [each for tree in trees.values() for each in _placed(tree, "", False)]
    for _ in range(ROUNDS):
        for node, function, looped in placed:
            ends = _follow(node, function, looped, decision) or ends
    calls = [node for node, *_ in placed if isinstance(node, ast.Call) and TOLD.search(_name(node.func))]
    told = any(
        decision.within(each) for call in calls for each in (*call.args, *(word.value for word in call.keywords))
    )
    return ends and not told


def _placed(node: ast.AST, function: str, looped: bool) -> Iterator[tuple[ast.AST, str, bool]]:
    """Yield all nodes, each with its function and whether it is in a loop there."""
    for child in ast.iter_child_nodes(node):
        yield child, function, looped
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _placed(child, child.name, False)
        else:
            yield from _placed(child, function, looped or isinstance(child, ast.For | ast.While))


def _follow(node: ast.AST, function: str, looped: bool, decision: _Decision) -> bool:
    """Add where the decision goes in a statement; return whether it ends a loop there."""
    if isinstance(node, ast.While):
        return decision.within(node.test)
    if isinstance(node, ast.Assign) and decision.within(node.value):
        decision.flags |= {_name(each) for each in node.targets} - {"", decision.counter}
    if isinstance(node, ast.Return) and function and decision.within(node.value):
        decision.functions.add(function)
    if not isinstance(node, ast.If) or not decision.within(node.test):
        return False
    inside = [each for statement in node.body for each in ast.walk(statement)]
    for each in inside:
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant) and each.value.value is True:
            decision.flags |= {_name(target) for target in each.targets} - {""}
        elif isinstance(each, ast.Return) and each.value is not None and function:
            decision.functions.add(function)
    leaves = any(isinstance(each, ast.Return) and each.value is None for each in inside)
    return looped and (leaves or any(isinstance(each, ast.Break) for each in inside))
