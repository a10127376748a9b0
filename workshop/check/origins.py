"""Find the statement of a program that causes what a rule has seen, from the line where it was seen.

A rule judges only what a run has shown. If its cause is a statement that the run cannot show, such as the one that computes a
number, the rule names the kind of cause in ``Seen.origin``, and ``at_origin`` looks for it: it reads the statement of
``where``, and follows the names in it back to their definitions. A line that it does not find stays as the rule has given it.
"""

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from workshop.check.places import place_of
from workshop.check.verdict import Finding

DEPTH = 8  # definitions that are followed one after the other
MOST = 200  # expressions that are read
FILES = 200  # files in which a class is looked for
SEEDS = (
    "manual_seed",
    "manual_seed_all",
    "seed",
    "default_rng",
    "Random",
    "RandomState",
    "set_seed",
    "seed_everything",
)
SYNC = ("require_backward_grad_sync", "set_requires_gradient_sync", "no_sync")
COUNTS = ("sum", "numel", "count_nonzero", "len", "size")
RANK = re.compile(r"rank|process_index|proc_id", re.IGNORECASE)
PER_RANK = re.compile(r"batch|world|proc|rank|gpus|replicas", re.IGNORECASE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Value:
    """An expression, and the statement that contains it."""

    expression: ast.AST
    statement: ast.stmt


def at_origin(finding: Finding, script: Path, folder: Path) -> Finding:
    """Return a finding whose ``where`` is the line of its cause, if its rule asks for it and the line is found.

    Args:
        finding: the finding.
        script: the program.
        folder: the folder in which it starts.
    """
    kind, _, detail = finding.origin.partition(":")
    if kind not in FINDERS:
        return finding
    with suppress(OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        place = place_of(finding, script, folder)
        source = Source(ast.parse(place.file.read_text()))
        start = source.statement(place.line)
        if start and (line := FINDERS[kind](source, start, detail)):
            name = finding.where.rpartition(":")[0]
            return replace(finding, where=f"{name}:{line}", origin="")
    others = _others(folder) if kind == "member" else ()  # a class is often in a file of its own
    found = [f"{file.relative_to(folder)}:{line}" for file in others if (line := _member_in(file, detail))]
    return replace(finding, where=found[0] if len(found) == 1 else finding.where, origin="")


def _others(folder: Path) -> Iterator[Path]:
    """Yield the files of a program, if there are not too many."""
    yield from itertools.islice(folder.rglob("*.py"), FILES)


def _member_in(file: Path, name: str) -> int | None:
    with suppress(OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        tree = ast.parse(file.read_text())
        return _member(Source(tree), tree.body[0], name)
    return None


class Source:
    """A parsed file, and the definitions in it."""

    def __init__(self, tree: ast.Module):
        self.tree = tree
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """The functions and methods, by name."""
        found: dict[str, list[Function]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def imported(self) -> set[str]:
        """The names of modules, and of what is imported from them."""
        found = (each for each in ast.walk(self.tree) if isinstance(each, ast.Import | ast.ImportFrom))
        return {alias.asname or alias.name.partition(".")[0] for each in found for alias in each.names}

    def statement(self, line: int) -> ast.stmt | None:
        """The innermost statement at a line."""
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
        ]
        return max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scopes(self, node: ast.AST) -> list[ast.AST]:
        """The functions that contain a node, and the module."""
        return [each for each in self.above(node) if isinstance(each, Function | ast.Module)]

    def within(self, scope: ast.AST) -> Iterator[ast.stmt]:
        """Yield the statements of a scope in order, without those of the functions and classes in it."""
        for child in ast.iter_child_nodes(scope):
            if isinstance(child, ast.stmt):
                yield child
            if not isinstance(child, Function | ast.ClassDef):
                yield from self.within(child)

    def trace(self, start: Iterable[Value], depth: int = DEPTH) -> Iterator[Value]:
        """Yield these values and, step by step, the values of the names in them; the closest come first."""
        level, seen, read = list(start), set[tuple[int, str]](), 0
        for _ in range(depth):
            following: list[Value] = []
            for value in level:
                read += 1
                if read > MOST:
                    return
                yield value
                for name in names_in(value.expression):
                    if name in self.imported:
                        continue
                    for scope in self.scopes(value.statement):
                        if found := self.definitions(name, scope, value.statement):
                            if (id(scope), name) not in seen:
                                following += found
                            seen.add((id(scope), name))
                            break
                following += self.returned(value)
            level = following

    def definitions(self, name: str, scope: ast.AST, at: ast.stmt) -> list[Value]:
        """The values that a name may have in a statement: the last assignment before it, or the arguments of all calls."""
        if name.startswith("self."):
            owner = next((each for each in self.above(at) if isinstance(each, ast.ClassDef)), None)
            scopes: list[ast.AST] = [each for each in owner.body if isinstance(each, Function)] if owner else []
        else:
            scopes = [scope]
        found = [value for each in scopes for inner in self.within(each) for value in assigned(inner, name)]
        found = [value for value in found if value.statement is not at or isinstance(at, ast.AugAssign)]
        before = [value for value in found if value.statement.lineno < at.lineno] or found
        if before:
            last = before[-1]
            same = [value for value in before if value.statement is last.statement]
            # ``rng = Generator()`` and ``rng.manual_seed(3)`` are two parts of a definition; so are ``x = ...`` and ``x /= y``.
            partial = isinstance(last.statement, ast.Expr | ast.AugAssign)
            return [*same, *before[-2:-1]] if partial else same
        return list(self.passed(scope, name)) if isinstance(scope, Function) else []

    def passed(self, function: Function, name: str) -> Iterator[Value]:
        """Yield what calls in this file pass as a parameter of a function."""
        parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        if name not in parameters and all(each.arg != name for each in function.args.kwonlyargs):
            return
        method = bool(parameters) and parameters[0] in ("self", "cls")
        wanted = next((each.name for each in self.above(function) if isinstance(each, ast.ClassDef)), "")
        for call in ast.walk(self.tree):
            if isinstance(call, ast.Call) and name_of(call.func) == (
                wanted if function.name == "__init__" else function.name
            ):
                statement = next((each for each in self.above(call) if isinstance(each, ast.stmt)), None)
                index = parameters.index(name) - method if name in parameters else len(call.args)
                given = [each.value for each in call.keywords if each.arg == name]
                given += call.args[index : index + 1]
                if given and statement:
                    yield Value(given[0], statement)

    def returned(self, value: Value) -> Iterator[Value]:
        """Yield what the functions of this file return that an expression calls; of a tuple, only the value in question."""
        element, whole = None, value.expression
        if isinstance(whole, ast.Subscript) and isinstance(whole.slice, ast.Constant):
            element, whole = whole.slice.value, whole.value
        for call in ast.walk(value.expression):
            if isinstance(call, ast.Call):
                for function in self.functions.get(name_of(call.func), []):
                    for statement in self.within(function):
                        if isinstance(statement, ast.Return) and statement.value:
                            result: ast.AST = statement.value
                            if call is whole and isinstance(element, int) and isinstance(result, ast.Tuple):
                                result = result.elts[element] if element < len(result.elts) else result
                            yield Value(result, statement)


def names_in(expression: ast.AST) -> list[str]:
    """The names that an expression reads, and ``self.name``; without those that it defines itself."""
    own = {each.arg for node in ast.walk(expression) if isinstance(node, ast.Lambda) for each in node.args.args}
    found: dict[str, None] = {}
    for node in ast.walk(expression):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found[f"self.{node.attr}"] = None
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                own.add(node.id)
            found[node.id] = None
    return [name for name in found if name not in own and name != "self"]


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name: "manual_seed" of ``torch.manual_seed``; "" for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def calls(node: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Yield the calls of functions or methods with these names."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and name_of(each.func) in names:
            yield each


def assigned(statement: ast.stmt, name: str) -> Iterator[Value]:
    """Yield the value that a statement gives to a name; for a part of a tuple, only this part."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from _unpacked(target, statement.value, name, statement)
    elif isinstance(statement, ast.AnnAssign) and statement.value:
        yield from _unpacked(statement.target, statement.value, name, statement)
    elif isinstance(statement, ast.AugAssign) and _is(statement.target, name):
        both = ast.BinOp(left=statement.target, op=statement.op, right=statement.value)
        yield Value(both, statement)
    elif isinstance(statement, ast.For | ast.AsyncFor):
        if any(_is(each, name) for each in ast.walk(statement.target)):
            yield Value(statement.iter, statement)
    elif isinstance(statement, ast.With | ast.AsyncWith):
        for item in statement.items:
            if item.optional_vars and any(_is(each, name) for each in ast.walk(item.optional_vars)):
                yield Value(item.context_expr, statement)
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr in SEEDS and _is(function.value, name):
            yield Value(statement.value, statement)
    for walrus in ast.walk(statement) if not hasattr(statement, "body") else ():
        if isinstance(walrus, ast.NamedExpr) and _is(walrus.target, name):
            yield Value(walrus.value, statement)


def _unpacked(target: ast.AST, value: ast.expr, name: str, statement: ast.stmt) -> Iterator[Value]:
    if _is(target, name):
        yield Value(value, statement)
    elif isinstance(target, ast.Tuple | ast.List):
        for index, part in enumerate(target.elts):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                yield from _unpacked(part, value.elts[index], name, statement)
            elif any(_is(each, name) for each in ast.walk(part)):
                whole = ast.Subscript(value=value, slice=ast.Constant(index), ctx=ast.Load())
                yield Value(whole, statement)


def _is(node: ast.AST, name: str) -> bool:
    """Whether a node is this name, or ``self.name``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return name == f"{node.value.id}.{node.attr}"
    return isinstance(node, ast.Name) and node.id == name


def header(statement: ast.stmt) -> Value:
    """A statement without the block below it."""
    parts = {"With": "items", "AsyncWith": "items", "For": "iter", "AsyncFor": "iter", "If": "test", "While": "test"}
    if part := parts.get(type(statement).__name__):
        found = getattr(statement, part)
        return Value(ast.Tuple([each.context_expr for each in found]) if isinstance(found, list) else found, statement)
    return Value(statement, statement)


def first(values: Iterable[Value], fits: Callable[[Value], bool]) -> int | None:
    """The line of the first value that fits."""
    return next((value.statement.lineno for value in values if fits(value)), None)


def _rates(source: Source) -> Iterator[Value]:
    """Yield the learning rates that the program sets in the groups of an optimizer."""
    for each in ast.walk(source.tree):
        if isinstance(each, ast.Assign):
            for target in each.targets:
                key = target.slice if isinstance(target, ast.Subscript) else None
                if isinstance(key, ast.Constant) and key.value == "lr":
                    yield Value(each.value, each)


def _total(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that computes a number of steps from the length of the data, or by a batch size."""
    begin = [header(start)]
    if detail == "by hand":  # the program sets the rates itself: the length is what it divides the number of a step by
        begin = [
            Value(division.right, value.statement)
            for value in source.trace(_rates(source))
            for division in ast.walk(value.expression)
            if isinstance(division, ast.BinOp) and isinstance(division.op, ast.Div)
        ]

    def computes(value: Value) -> bool:
        divisions = (each for each in ast.walk(value.expression) if isinstance(each, ast.BinOp))
        by_part = any(
            isinstance(each.op, ast.Div | ast.FloorDiv) and PER_RANK.search(ast.unparse(each.right))
            for each in divisions
        )
        return by_part or any(calls(value.expression, "len"))

    return first(source.trace(begin), computes)


def _tag(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that makes the tag of a checkpoint."""

    def makes(value: Value) -> bool:
        return isinstance(value.expression, ast.JoinedStr | ast.BinOp | ast.Call)

    saves = list(calls(start, "save_checkpoint"))
    given = [each.value for call in saves for each in call.keywords if each.arg == "tag"]
    given += [each for call in saves for each in call.args[1:2]]
    return first(source.trace([Value(each, start) for each in given]), makes)


def _divisor(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that divides a loss by a count."""

    def divides(value: Value) -> bool:
        for each in ast.walk(value.expression):
            by: list[ast.AST] = [each.right] if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div) else []
            by += [call.args[0] for call in calls(each, "div", "div_", "divide") if call is each and call.args]
            behind = source.trace([Value(one, value.statement) for one in by])
            if any(any(calls(count.expression, *COUNTS)) for count in behind):
                return True
        return False

    return first(source.trace([header(start)]), divides)


def _sync(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that decides whether DDP averages gradients, closest to a backward pass."""
    blocks = [each for each in source.above(start) if isinstance(each, ast.With | ast.AsyncWith)]
    around = source.trace(map(header, blocks))
    if line := first(around, lambda value: any(calls(value.expression, *SYNC))):
        return line
    lines = {node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and node.attr in SYNC}
    own = next(iter(source.scopes(start)))
    end = getattr(own, "end_lineno", None) or start.lineno
    near = [line for line in lines if getattr(own, "lineno", 1) <= line <= end]
    near = near or (list(lines) if len(lines) == 1 else [])
    return min(near, key=lambda line: abs(line - start.lineno), default=None)


def _condition(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The condition around the closest call of a method, after a line where it was not called."""
    scope = source.scopes(start)[0]
    found = [each for each in calls(scope, detail) if each.lineno >= start.lineno]
    for call in sorted(found, key=lambda each: each.lineno):
        return next((each.lineno for each in source.above(call) if isinstance(each, ast.If)), None)
    return None


def _member(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The only assignment to this attribute of ``self``."""
    found = [
        each.lineno
        for each in ast.walk(source.tree)
        if isinstance(each, ast.Assign | ast.AnnAssign) and any(assigned(each, f"self.{detail}"))
    ]
    return found[0] if len(found) == 1 else None


def _seed(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that seeds what a value is drawn from, without the rank."""

    def alike(value: Value) -> bool:
        seeds = [Value(each, value.statement) for call in calls(value.expression, *SEEDS) for each in call.args]
        behind = source.trace(seeds, depth=3)  # further back, everything depends on the device of the rank
        return bool(seeds) and not any(RANK.search(ast.unparse(each.expression)) for each in behind)

    return first(source.trace([header(start)]), alike)


def _restored(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The last statement of the block in which a checkpoint is loaded that uses the checkpoint.

    ``detail``: the name of a variable; a statement that sets its state is closer.
    """
    block = source.parents[start]
    own = source.scopes(start)[0]
    for call in calls(own, "set_state", "setstate") if detail else ():
        if call.lineno >= start.lineno and isinstance(call.func, ast.Attribute) and _is(call.func.value, detail):
            return call.lineno
    loaded = [name for target in getattr(start, "targets", []) for name in names_stored(target)]
    after = [each for each in ast.iter_child_nodes(block) if isinstance(each, ast.stmt) and each.lineno >= start.lineno]
    using = [each for each in after if any(name in loaded for name in names_in(each))]
    return using[-1].lineno if using else None


def _made(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The last assignment to a variable in a function."""
    statements = source.within(source.scopes(start)[0])
    found = [each.lineno for each in statements if isinstance(each, ast.Assign) and any(assigned(each, detail))]
    return found[-1] if found else None


def names_stored(target: ast.AST) -> list[str]:
    """The names in the target of an assignment."""
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _state(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that asks an optimizer for the state that is saved."""

    def asks(value: Value) -> bool:
        return any("opt" in ast.unparse(call.func).lower() for call in calls(value.expression, "state_dict"))

    return first(source.trace([header(start)]), asks)


FINDERS: dict[str, Callable[[Source, ast.stmt, str], int | None]] = {
    "condition": _condition,
    "divisor": _divisor,
    "made": _made,
    "member": _member,
    "restored": _restored,
    "seed": _seed,
    "state": _state,
    "sync": _sync,
    "tag": _tag,
    "total": _total,
}
