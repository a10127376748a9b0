"""Find the statement with which a rank gets values of its own, such as a part of the data, for ``origins.py``."""

import ast
import itertools
import re
from collections.abc import Callable

from workshop.check.definitions import SEEDS, Source, Value, assigned, calls, first, header, in_order, name_of

RANK = re.compile(r"rank|process_index|proc_id", re.IGNORECASE)
STATISTICS = ("mean", "std", "var", "std_mean", "var_mean", "median", "quantile", "amin", "amax", "min", "max")


def _share(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The closest statement behind a statement that mentions the rank, such as ``mine = data[rank::world_size]``."""
    values = (value for value in source.trace([header(start)]) if value.statement is not start)
    return first(values, _of_rank)


def _of_rank(value: Value) -> bool:
    return bool(RANK.search(ast.unparse(value.expression)))


def _encoder(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that computes a variable, or an attribute of one, from the data of a rank or in the order of a set."""
    owner, _, part = detail.partition(".")
    places = [
        found[-1].statement
        for name in (detail, f"self.{part}", owner)
        for scope in (*source.scopes(start), *itertools.chain.from_iterable(source.functions.values()))
        if (found := [value for each in source.within(scope) for value in assigned(each, name)])
    ]
    for place in places:
        if line := first(source.trace([header(place)]), _computes_encoder):
            return line
    return places[0].lineno if places else None


def _computes_encoder(value: Value) -> bool:
    ordered = {each for call in calls(value.expression, "sorted") for each in ast.walk(call)}
    sets = (each for each in ast.walk(value.expression) if each not in ordered and _is_set(each))
    return _of_rank(value) or any(calls(value.expression, *STATISTICS)) or any(sets)


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
    return next((call.lineno for call in found if any(RANK.search(ast.unparse(each)) for each in call.args)), None)


OF_RANKS: dict[str, Callable[[Source, ast.stmt, str], int | None]] = {
    "encoder": _encoder,
    "reseeded": _reseeded,
    "share": _share,
}
