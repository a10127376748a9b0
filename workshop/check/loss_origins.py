"""Find the statements of a program that scale a loss, or that choose the gradients that are averaged (see ``origins.py``)."""

import ast
from collections.abc import Iterator

from workshop.check.definitions import Function, Source, Value, calls, first, header, is_name, name_of, names_in

ADDS = ("append", "extend")
LOSS = "compute_loss_func"
ITEMS = "num_items_in_batch"  # an argument of compute_loss() and compute_loss_func of the Trainer of transformers
COUNTS = ("sum", "numel", "count_nonzero", "len", "size")


def divisor(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that divides a loss by a count; ``detail``: of the loss that the function with this name returns."""
    returns = [
        Value(each, each)
        for function in source.functions.get(detail, [])
        for each in source.within(function)
        if isinstance(each, ast.Return)
    ]

    def divides(value: Value) -> bool:
        for each in ast.walk(value.expression):
            by: list[ast.AST] = [each.right] if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div) else []
            by += [call.args[0] for call in calls(each, "div", "div_", "divide") if call is each and call.args]
            behind = source.trace([Value(one, value.statement) for one in by])
            given = detail and any(name.startswith("num_") for one in by for name in names_in(one))
            if given or any(any(calls(count.expression, *COUNTS)) for count in behind):
                return True
        return False

    return first(source.trace(returns if detail else [header(start)]), divides) or (
        None if detail else _ignoring(source)
    )


def given(source: Source, start: ast.stmt, detail: str) -> int | None:
    """What the function returns that a Trainer gets as ``compute_loss_func``."""
    names = [name_of(each.value) for call in calls(source.tree) for each in call.keywords if each.arg == LOSS]
    for function in (each for name in names for each in source.functions.get(name, [])):
        returns = [each.lineno for each in source.within(function) if isinstance(each, ast.Return)]
        return returns[-1] if returns else function.lineno
    return None


def _ignoring(source: Source) -> int | None:
    """The count by which a function divides a loss, if it ignores the number of targets that the Trainer passes."""
    for function in (each for nodes in source.functions.values() for each in nodes):
        arguments = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
        used = {each.id for each in ast.walk(function) if isinstance(each, ast.Name)}
        for statement in source.within(function) if ITEMS in arguments - used else ():
            divisions = (each for each in ast.walk(statement) if isinstance(each, ast.BinOp))
            by = [Value(each.right, statement) for each in divisions if isinstance(each.op, ast.Div)]
            if line := first(source.trace(by), lambda value: any(calls(value.expression, *COUNTS))):
                return line
    return None


def averaged(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that chooses which gradients a statement averages: it adds them to a list, or passes parameters."""
    for value in source.trace([header(start)]):
        for name in names_in(value.expression):
            added = [each.lineno for each in _additions(source, value.statement, name) if each is not start]
            if added:
                return added[-1]
        loop = isinstance(value.statement, ast.For | ast.AsyncFor)
        if not loop and value.statement is not start and any(calls(value.expression, "parameters", "named_parameters")):
            return value.statement.lineno
    return None


def _additions(source: Source, at: ast.stmt, name: str) -> Iterator[ast.stmt]:
    """Yield the statements that add elements to a list: in the function of a statement, or in its class for ``self.name``."""
    own = name.startswith("self.")
    owner = next((each for each in source.above(at) if isinstance(each, ast.ClassDef)), None) if own else None
    scopes = [each for each in owner.body if isinstance(each, Function)] if owner else source.scopes(at)[:1]
    for statement in (each for scope in scopes for each in source.within(scope)):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            if isinstance(function, ast.Attribute) and function.attr in ADDS and is_name(function.value, name):
                yield statement


def reduced(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The first use of what a collective has reduced, such as the count by which a loss is divided."""
    own = [each for call in calls(start, detail) for each in call.args[:1] + [key.value for key in call.keywords]]
    names = [name for each in own for name in names_in(each)]
    for statement in source.within(source.scopes(start)[0]):
        used = getattr(statement, "value", None) or header(statement).expression
        if statement.lineno > (start.end_lineno or start.lineno) and set(names) & set(names_in(used)):
            return statement.lineno
    return None


def gathering(source: Source, start: ast.stmt, detail: str) -> int | None:
    """What the backward pass of a function returns, if the collective in its forward pass is in a class of the program."""
    owner = next((each for each in source.above(start) if isinstance(each, ast.ClassDef)), None)
    for function in owner.body if owner else ():
        if isinstance(function, Function) and function.name == "backward":
            returns = [each.lineno for each in source.within(function) if isinstance(each, ast.Return)]
            return returns[-1] if returns else function.lineno
    return None
