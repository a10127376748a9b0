"""Find the statement of a program that causes what a rule has seen, from the line where it was seen.

A rule judges only what a run has shown. If its cause is a statement that the run cannot show, such as the one that computes a
number, the rule names the kinds of cause to look for: in ``Seen.origin``, or for all its findings in ``Rule.origin``.
``at_origin`` returns the line of the first kind that is found: it reads the statement of ``where``, and follows the names in it
back to their definitions. If none is found, or the origin is "here", the line stays as the rule has given it.
"""

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from workshop.check import callers, kept, loaders
from workshop.check.definitions import (
    SEEDS,
    Function,
    Source,
    Value,
    assigned,
    calls,
    first,
    header,
    in_order,
    name_of,
    names_in,
)
from workshop.check.loss_origins import averaged, divisor, gathering, given, reduced
from workshop.check.own_values import OF_RANKS, RANK
from workshop.check.places import place_of
from workshop.check.verdict import Finding

FILES = 200  # files in which a class is looked for
SYNC = ("require_backward_grad_sync", "set_requires_gradient_sync", "no_sync", "no_backward_sync")
STEPS = re.compile(r"step|iter|total|max", re.IGNORECASE)
DEVICE = re.compile(r"local|device|gpu|cuda|index", re.IGNORECASE)
PER_RANK = re.compile(r"batch|world|proc|rank|gpus|replicas", re.IGNORECASE)


def at_origin(finding: Finding, script: Path, folder: Path) -> Finding:
    """Return a finding whose ``where`` is the line of its cause, if its rule asks for it and the line is found.

    Args:
        finding: the finding.
        script: the program, or a job script.
        folder: the folder in which it starts.
    """
    place = place_of(finding, script, folder)
    own = script.relative_to(folder) if script.is_relative_to(folder) else Path(script.name)
    name = finding.where.rpartition(":")[0] or str(own)
    for origin in (finding.origin or finding.rule.origin).split():
        kind, _, detail = origin.partition(":")
        if kind == "line":  # none of the kinds before it was found
            return replace(finding, where=detail, origin="")
        if line := _line(place.file, place.line, kind, detail):
            return replace(finding, where=f"{name}:{line}", origin="")
        if kind in ("member", "unpersistent"):  # a class is often in a file of its own
            found = [
                f"{file.relative_to(folder)}:{line}"
                for file in itertools.islice(folder.rglob("*.py"), FILES)
                if (line := _line(file, 1, *origin.split(":")))
            ]
            if len(found) == 1:
                return replace(finding, where=found[0], origin="")
    return replace(finding, origin="")


def _line(file: Path, line: int, kind: str, detail: str) -> int | None:
    """The line of a cause in a file, seen from a line (0: unknown)."""
    with suppress(OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        text = file.read_text()
        if kind == "text":
            return next((number for number, each in enumerate(text.splitlines(), 1) if re.search(detail, each)), None)
        if kind in FINDERS:
            source = Source(ast.parse(text))
            start = source.statement(line)
            if start is None and kind in ANYWHERE:
                start = next(iter(source.tree.body), None)  # none in an empty file
            return FINDERS[kind](source, start, detail) if start else None
    return None


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
    inner = [name for name in names_in(start) if name in source.functions]  # the function of LambdaLR, for example
    begin += [Value(each, each) for name in inner for each in source.functions[name]]
    if detail == "by-hand":  # the program sets the rates itself: the length is what it divides the number of a step by
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


def _sync(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that decides whether DDP averages gradients, closest to a backward pass."""
    blocks = [each for each in (start, *source.above(start)) if isinstance(each, ast.With | ast.AsyncWith)]
    around = source.trace(map(header, blocks))
    for value in around:
        if any(calls(value.expression, *SYNC)):
            choices = [each for each in ast.walk(value.expression) if isinstance(each, ast.IfExp)]
            if any(_steps_under(source, each) for each in choices):
                return value.statement.lineno
            flags = [each.test for each in choices]
            named = [Value(each, value.statement) for each in flags if isinstance(each, ast.Name)]
            return first(source.trace(named), _defines) or value.statement.lineno
    lines = {node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and node.attr in SYNC}
    own = next(iter(source.scopes(start)))
    end = getattr(own, "end_lineno", None) or start.lineno
    near = [line for line in lines if getattr(own, "lineno", 1) <= line <= end]
    near = near or (list(lines) if len(lines) == 1 else [])
    return min(near, key=lambda line: abs(line - start.lineno), default=None)


def _steps_under(source: Source, choice: ast.IfExp) -> bool:
    """Whether a choice enters no_sync() under the condition under which the optimizer steps: then the choice itself is wrong."""
    condition = ast.unparse(choice.test)
    blocks = (
        each for each in ast.walk(source.tree) if isinstance(each, ast.If) and ast.unparse(each.test) == condition
    )
    steps = any(any(calls(part, "step")) for block in blocks for part in block.body)
    return steps and any(calls(choice.body, "no_sync"))


def _member(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The only assignment to this attribute of ``self``, or the only one in an ``__init__``."""
    found = [
        each
        for each in ast.walk(source.tree)
        if isinstance(each, ast.Assign | ast.AnnAssign) and any(assigned(each, f"self.{detail}"))
    ]
    first = [each for each in found if getattr(source.scopes(each)[0], "name", "") == "__init__"]
    return next((each[0].lineno for each in (found, first) if len(each) == 1), None)


def _seed(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that seeds what a value is drawn from, without the rank."""

    def alike(value: Value) -> bool:
        seeds = [Value(each, value.statement) for call in calls(value.expression, *SEEDS) for each in call.args]
        behind = source.trace(seeds, depth=3)  # further back, everything depends on the device of the rank
        return bool(seeds) and not any(RANK.search(ast.unparse(each.expression)) for each in behind)

    return first(source.trace([header(start)]), alike)


# ---------------------------------------------------------------- statements of a kind


def _call(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The first call of a function, or one of its arguments: of "Trainer.devices|Trainer" the first that the file has.

    ".Model.*from_": the first call of a function whose dotted name matches this expression.
    """
    for each in detail.split("|"):
        name, _, argument = each.partition(".")
        for call in in_order(calls(source.tree, name) if name else _calls_like(source, argument)):
            given = [keyword.value.lineno for keyword in call.keywords if keyword.arg == argument]
            if given or not argument or not name:
                return given[0] if given else call.lineno
    return None


def _calls_like(source: Source, pattern: str) -> Iterator[ast.Call]:
    return (
        each
        for each in ast.walk(source.tree)
        if isinstance(each, ast.Call) and re.search(pattern, ast.unparse(each.func))
    )


def _logged(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The call of ``log`` with this name."""
    for call in in_order(calls(source.tree, "log", "log_dict")):
        if any(isinstance(each, ast.Constant) and each.value == detail for each in ast.walk(call)):
            return call.lineno
    return None


def _length(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The number of steps that is passed in the only call of the function that makes a schedule; else this call."""
    function = source.scopes(start)[0]
    found = source.calls_of(function)
    if len(found) != 1 or not isinstance(function, Function) or isinstance(source.scopes(found[0])[0], ast.Module):
        return None
    given = [keyword for call in calls(found[0], function.name) for keyword in call.keywords if keyword.arg]
    steps = [each for each in given if STEPS.search(each.arg or "") and "warm" not in (each.arg or "")]
    return steps[-1].value.lineno if steps else found[0].lineno


def _returned(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The last return statement of a function, or the function if it has none."""
    for function in source.functions.get(detail, []):
        found = [each.lineno for each in source.within(function) if isinstance(each, ast.Return)]
        return found[-1] if found else function.lineno
    return None


def _environ(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that sets an environment variable."""
    for each in (node for node in ast.walk(source.tree) if isinstance(node, ast.Assign)):
        for target in each.targets:
            if (
                isinstance(target, ast.Subscript)
                and "environ" in ast.unparse(target.value)
                and detail in ast.unparse(target)
            ):
                return each.lineno
    return None


def _configured(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The only statement that changes an entry of a configuration."""
    found = []
    for each in ast.walk(source.tree):
        if isinstance(each, ast.Assign | ast.Delete):
            parts = [target for target in each.targets if isinstance(target, ast.Subscript)]
            found += [each.lineno] if any("config" in ast.unparse(part.value).lower() for part in parts) else []
    return found[0] if len(found) == 1 else None


def _uncalled(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The function that loads a checkpoint, if nothing calls it."""
    for function in itertools.chain.from_iterable(source.functions.values()):
        loads = any(calls(function, "load", "load_state_dict", "load_checkpoint", "load_state"))
        if loads and not source.calls_of(function):
            return function.lineno
    return None


def _printed(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The only call of print() that no condition about the rank protects."""
    free = [
        call.lineno
        for call in calls(source.tree, "print")
        if not any(isinstance(each, ast.If) and RANK.search(ast.unparse(each.test)) for each in source.above(call))
    ]
    return free[0] if len(free) == 1 else None


# ---------------------------------------------------------------- from the statement that was seen


def _receiver(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that makes what a method is called on, such as the loss of ``loss.backward()``.

    ``detail``: the method; its last call before ``start`` counts, if ``start`` does not call it. Of ``engine.backward(loss)``,
    the loss counts.
    """
    scope = source.scopes(start)[0]
    before = [call for call in in_order(calls(scope, detail)) if call.lineno <= (start.end_lineno or start.lineno)]
    for call in before[-1:]:
        of = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
        around = next((each for each in source.above(call) if isinstance(each, ast.stmt)), start)
        if isinstance(of, ast.Name | ast.Attribute):
            return first(source.trace([Value(of, around)]), _defines)
    return None


def _model(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The assignment that makes the model that a statement calls."""
    called = [
        Value(each.func, start)
        for each in ast.walk(start)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
    ]
    own = [each for each in called if name_of(each.expression) not in source.imported | set(source.functions)]
    return first(source.trace(own), _defines)


def _defines(value: Value) -> bool:
    """Whether a value is what its statement assigns."""
    given = getattr(value.statement, "value", None) if isinstance(value.statement, ast.Assign) else None
    part = value.expression.value if isinstance(value.expression, ast.Subscript) else None
    return given is not None and (value.expression is given or part is given)


def _last(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The last call of a function before the end of a statement, in the same function."""
    found = [call.lineno for call in in_order(calls(source.scopes(start)[0], detail))]
    before = [line for line in found if line <= (start.end_lineno or start.lineno)]
    return before[-1] if before else None


def _times(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that repeats a list, such as ``[tensor] * world_size``."""

    def repeats(value: Value) -> bool:
        products = (each for each in ast.walk(value.expression) if isinstance(each, ast.BinOp))
        return any(isinstance(each.op, ast.Mult) and isinstance(each.left, ast.List) for each in products)

    return first(source.trace([header(start)]), repeats)


def _numbered(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement behind a number of a device that matches ``detail``, if it names the number as one of a device or a node."""

    def chooses(value: Value) -> bool:
        targets = getattr(value.statement, "targets", [])
        named = any(DEVICE.search(ast.unparse(each)) for each in targets)
        return (named or value.statement is start) and bool(re.search(detail, ast.unparse(value.expression)))

    return first(source.trace([header(start)]), chooses)


def _holds(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement behind the arguments of a statement whose text matches ``detail``."""
    begin = Value(start.value, start) if isinstance(start, ast.Assign) else header(start)  # x = f(x): an earlier x
    return first(source.trace([begin]), lambda value: bool(re.search(detail, ast.unparse(value.expression))))


def _figure(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that computes a value which a call gets: the argument with this name, or a variable of this name."""
    given = [
        each.value for call in calls(start, "write", "log") for each in call.keywords if detail in (each.arg or "")
    ]
    given += [each for call in calls(start, "write", "log") for each in call.args if detail in ast.unparse(each)]
    return first(source.trace([Value(each, start) for each in given[:1]]), _computes)


def _computes(value: Value) -> bool:
    divided = (isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div) for each in ast.walk(value.expression))
    item = isinstance(value.expression, ast.Call) and name_of(value.expression.func) == "item"
    return any(divided) or any(calls(value.expression, "mean", "all_reduce")) or item


def _kept(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement around the step that stores a tensor in a list or a larger tensor, without item() or detach()."""
    for each in source.within(source.scopes(start)[0]):
        stored: list[ast.expr] = []
        whole = isinstance(each, ast.Assign) and not any(isinstance(target, ast.Subscript) for target in each.targets)
        if isinstance(each, ast.Assign | ast.AugAssign) and not whole:
            stored = [each.value]
        elif isinstance(each, ast.Expr):
            stored = [argument for call in calls(each, "append") for argument in call.args]
        if any(isinstance(value, ast.Name) and "loss" in value.id for value in stored):
            return each.lineno
    return None


FINDERS: dict[str, Callable[[Source, ast.stmt, str], int | None]] = {
    **OF_RANKS,
    "anew": kept.anew,
    "argument": callers.argument,
    "averaged": averaged,
    "call": _call,
    "condition": callers.condition,
    "configured": _configured,
    "divisor": divisor,
    "given-loss": given,
    "environ": _environ,
    "figure": _figure,
    "filled": kept.filled,
    "gate": callers.gate,
    "gathering": gathering,
    "held": kept.held,
    "hook": callers.hook,
    "holds": _holds,
    "inplace": callers.in_place,
    "joined": kept.joined,
    "kept": _kept,
    "key": kept.key,
    "last": _last,
    "length": _length,
    "dealt": loaders.dealt,
    "listed": loaders.listed,
    "loader": loaders.loader,
    "loading": kept.loading,
    "logged": _logged,
    "made": kept.made,
    "once": callers.only_once,
    "of-first": kept.of_first,
    "of-rank": loaders.of_rank_alone,
    "of-some": kept.of_some,
    "member": _member,
    "meets": callers.meets,
    "model": _model,
    "numbered": _numbered,
    "owner": callers.owner,
    "passed": callers.passed,
    "printed": _printed,
    "rank-gate": callers.rank_gate,
    "receiver": _receiver,
    "reduced": reduced,
    "rescaled": kept.rescaled,
    "restored": kept.restored,
    "returned": _returned,
    "seed": _seed,
    "state": kept.state,
    "stateful": kept.stateful,
    "saved": kept.saved,
    "sync": _sync,
    "tag": kept.tag,
    "times": _times,
    "total": _total,
    "trains": kept.trains,
    "uncalled": _uncalled,
    "undivided": loaders.undivided,
    "undealt": loaders.undealt,
    "ungated": callers.ungated,
    "without-gradients": callers.without_gradients,
    "unpersistent": kept.unpersistent,
    "unread": kept.unread,
}
ANYWHERE = {
    "anew",
    "call",
    "configured",
    "uncalled",
    "environ",
    "loading",
    "logged",
    "member",
    "one-rank",
    "prepared",
    "printed",
    "reseeded",
    "returned",
    "stateful",
    "trains",
}  # they need no line to begin with
