"""Find the statement with which a rank gets values of its own, such as a part of the data, for ``origins.py``."""

import ast
import itertools
import re
from collections.abc import Callable

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
    names_stored,
)

RANK = re.compile(r"rank|process_index|proc_id", re.IGNORECASE)
ASKS_RANK = re.compile(r"rank|process_index|proc_id|is_(local_)?main_process|is_global_zero", re.IGNORECASE)
STATISTICS = ("mean", "sum", "std", "var", "std_mean", "var_mean", "median", "quantile", "amin", "amax", "min", "max")
QUOTIENTS = ("mean", "div", "div_", "divide", "log", "log10", "log2", "exp", "sqrt", "median")


def _share(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The closest statement behind a statement that mentions the rank, such as ``mine = data[rank::world_size]``."""
    for value in source.trace([header(start)]):
        if value.statement is not start and of_rank(value):
            named = (each for each in ast.walk(value.expression) if isinstance(each, ast.Name | ast.Attribute))
            lines = (each.lineno for each in named if RANK.search(ast.unparse(each)))  # within a long statement
            return next(lines, value.statement.lineno)
    return None


def of_rank(value: Value) -> bool:
    return bool(RANK.search(ast.unparse(value.expression)))


def _encoder(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that computes a variable, or an attribute of one, from the data of a rank or in the order of a set."""
    owner, _, part = detail.partition(".")
    places = [
        sorted(found, key=_computed)[-1].statement  # rather than read from a checkpoint
        for name in (detail, f"self.{part}", owner)
        for scope in (*source.scopes(start), *itertools.chain.from_iterable(source.functions.values()))
        if (found := [value for each in source.within(scope) for value in assigned(each, name)])
    ]
    for place in places:
        for computes in (_computes_statistic, of_rank):
            if line := first(source.trace([header(place)]), computes):
                return line
    return places[0].lineno if places else None


def _computed(value: Value) -> bool:
    """Whether a value is not an entry of a dictionary."""
    part = value.expression
    return not (isinstance(part, ast.Subscript) and isinstance(getattr(part.slice, "value", None), str))


def _computes_statistic(value: Value) -> bool:
    ordered = {each for call in calls(value.expression, "sorted") for each in ast.walk(call)}
    sets = (each for each in ast.walk(value.expression) if each not in ordered and _is_set(each))
    return any(calls(value.expression, *STATISTICS)) or any(sets)


def _is_set(node: ast.AST) -> bool:
    made = isinstance(node, ast.Call) and name_of(node.func) in ("set", "frozenset")
    return made or isinstance(node, ast.Set | ast.SetComp)


def _reseeded(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The first call that seeds with the rank; ``detail``: "loop": the first one in a loop."""
    found = in_order(calls(source.tree, *SEEDS))
    if detail:
        return next(
            (call.lineno for call in found if any(isinstance(each, ast.For) for each in source.above(call))), None
        )
    own = [call for call in found if any(RANK.search(ast.unparse(each)) for each in call.args)]
    # ``torch.manual_seed()`` rather than that of a generator of its own.
    own.sort(key=lambda call: isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call))
    return own[0].lineno if own else None


def _stream(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The first statement of a function, such as the __iter__ of a stream, that mentions the rank.

    ``detail``: "share": rather the one that takes a part of the data, or else the first loop.
    """
    statements = list(map(header, source.within(start))) if isinstance(start, Function) else []
    if detail:
        loops = ast.For | ast.While
        taking = [each for each in statements if not any(calls(each.expression, *SEEDS))]
        found = first(taking, of_rank) or first(taking, lambda each: isinstance(each.statement, loops))
        return found or first(statements, of_rank)
    return first(statements, of_rank)


def _weights(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that counts the classes for the weights of a loss, or else computes the weights with a division."""
    given = [each for call in calls(start) for each in call.keywords if each.arg in ("weight", "pos_weight")]
    begin = [Value(each.value, start) for each in given] or [header(start)]
    behind = [value for value in source.trace(begin) if value.statement is not start]
    names = {each.attr for value in behind for each in ast.walk(value.expression) if isinstance(each, ast.Attribute)}
    members = (
        Value(each.value, each)
        for each in ast.walk(source.tree)
        if isinstance(each, ast.Assign) and any(name_of(target) in names for target in each.targets)
    )
    computing = next((value for value in itertools.chain(behind, members) if _divides(value)), None)
    counted = first(source.trace([computing]), _counts) if computing else None
    return counted or (computing.statement.lineno if computing else None)


def _counts(value: Value) -> bool:
    """Whether a statement counts all at once, not a part in each turn of a loop."""
    return isinstance(value.statement, ast.Assign) and any(calls(value.expression, "bincount", "unique", "Counter"))


def _plateau(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The step of a schedule that decides by a metric; ``detail``: only if it comes before the statement."""
    for call in in_order(calls(source.tree, "step")):
        statement = next((each for each in source.above(call) if isinstance(each, ast.stmt)), None)
        if call.args and isinstance(call.func, ast.Attribute) and statement:
            behind = source.trace([Value(call.func.value, statement)])
            if any(any(calls(value.expression, "ReduceLROnPlateau")) for value in behind):
                late = call.lineno > start.lineno or source.scopes(call)[0] is not source.scopes(start)[0]
                loops = [each for each in source.above(call) if isinstance(each, ast.For | ast.While)]
                begin, own = loops[-1].lineno if loops else 0, source.scopes(call)[0]

                def computes(value: Value, own: ast.AST = own, begin: int = begin) -> bool:
                    """What is made before the loop, such as the model, is not the metric."""
                    before = source.scopes(value.statement)[0] is own and value.statement.lineno < begin
                    return _divides(value) and not before

                metric = source.trace([Value(call.args[0], statement)])
                return None if detail and late else first(metric, computes) or call.lineno
    return None


def _used(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The first statement that gives what a call of ``detail`` makes to a function of the program."""
    made = (each for each in ast.walk(source.tree) if isinstance(each, ast.Assign) and any(calls(each.value, detail)))
    names = {name for each in made for target in each.targets for name in names_stored(target)}
    for call in in_order(calls(source.tree, *source.functions)):
        if isinstance(call.func, ast.Name) and any(
            isinstance(each, ast.Name) and each.id in names for each in call.args
        ):
            return call.lineno
    return None


def _on_one_rank(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The first call of a method of a schedule, such as ``step``, in a block that only one rank runs."""
    for call in in_order(calls(source.tree, detail)):
        inside = (each for each in source.above(call) if isinstance(each, ast.If))
        of = ast.unparse(call.func.value).lower() if isinstance(call.func, ast.Attribute) else ""
        if "sched" in of and any(RANK.search(ast.unparse(each.test)) for each in inside):
            return call.lineno
    return None


def _prepared(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement of prepare_data() that sets an attribute."""
    for function in source.functions.get("prepare_data", []):
        for each in source.within(function):
            if any(assigned(each, f"self.{detail}")):
                return each.lineno
    return None


def _changed(source: Source, start: ast.stmt, detail: str) -> int | None:
    """What changes a variable: its last assignment; of "owner.part", the call of a method of the owner that assigns the part."""
    owner, _, part = detail.rpartition(".")
    if not owner or owner == "self":
        own = [each.lineno for each in source.within(source.scopes(start)[0]) if any(assigned(each, detail))]
        return own[-1] if own else None
    methods = [each for nodes in source.functions.values() for each in nodes if each.name != "__init__"]
    setters = {each.name for each in methods if any(any(assigned(one, f"self.{part}")) for one in source.within(each))}
    for call in in_order(calls(source.tree, *setters)) if setters else ():
        if isinstance(call.func, ast.Attribute) and name_of(call.func.value) == name_of(
            ast.parse(owner, mode="eval").body
        ):
            return call.lineno
    found = [each.lineno for each in ast.walk(source.tree) if isinstance(each, ast.Assign | ast.AugAssign)
             and any(ast.unparse(to) == detail for to in getattr(each, "targets", [getattr(each, "target", None)]))]  # fmt: skip
    return found[-1] if found else None


def _exchanged(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that computes what a collective exchanges, if this is no sum: a quotient, a mean, an entry with a key.

    If the collective is in a function that returns the result: rather a call that does not use the result.
    """
    function = source.scopes(start)[0]
    returns = isinstance(function, Function) and any(
        isinstance(each, ast.Return) and each.value for each in source.within(function)
    )
    unused = [each.lineno for each in source.calls_of(function) if isinstance(each, ast.Expr)] if returns else []
    if unused:
        return unused[0]
    given = [Value(each, start) for call in calls(start) for each in call.args]
    values = (value for value in source.trace(given) if value.statement is not start)

    def computes(value: Value) -> bool:
        inner = source.returned(value) if source.scopes(value.statement)[0] is function else ()
        return _divides(value) or any(map(_divides, inner)) or _has_key(value) or _gathers(source, value)

    return first(values, computes)


def _divides(value: Value) -> bool:
    divided = (isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div) for each in ast.walk(value.expression))
    return any(divided) or any(calls(value.expression, *QUOTIENTS))


def _has_key(value: Value) -> bool:
    """Whether a statement stores a value under a key that it computes."""
    targets = value.statement.targets if isinstance(value.statement, ast.Assign) else []
    return any(isinstance(each, ast.Subscript) and not isinstance(each.slice, ast.Constant) for each in targets)


def _gathers(source: Source, value: Value) -> bool:
    """Whether a value is gathered from all ranks, also by a function of the program."""
    called = [name_of(call.func) for call in calls(value.expression)]
    inner = [name_of(call.func) for name in called for each in source.functions.get(name, []) for call in calls(each)]
    return any(name.startswith("all_gather") for name in (*called, *inner))


def _stepping(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The first call of ``step`` of a schedule."""
    for call in in_order(calls(source.tree, "step")):
        if isinstance(call.func, ast.Attribute) and "sched" in ast.unparse(call.func.value).lower():
            return call.lineno
    return None


def _in_worker(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The first call that seeds in a function that a loader gets as ``worker_init_fn``."""
    given = [each.value for call in calls(source.tree) for each in call.keywords if each.arg == "worker_init_fn"]
    for function in (each for value in given for each in source.functions.get(name_of(value), [])):
        for call in in_order(calls(function, *SEEDS)):
            return call.lineno
    return None


OF_RANKS: dict[str, Callable[[Source, ast.stmt, str], int | None]] = {
    "changed": _changed,
    "encoder": _encoder,
    "exchanged": _exchanged,
    "in-worker": _in_worker,
    "one-rank": _on_one_rank,
    "plateau": _plateau,
    "prepared": _prepared,
    "reseeded": _reseeded,
    "share": _share,
    "stepping": _stepping,
    "stream": _stream,
    "used": _used,
    "weights": _weights,
}
