"""Find where a program makes a loader or divides its data: finders for ``origins.py``."""

import ast
from collections.abc import Iterator

from workshop.check.definitions import Function, Source, Value, assigned, calls, first, header, in_order, name_of
from workshop.check.own_values import RANK, of_rank

DIVIDED = ("sampler", "batch_sampler", "dataset")  # the arguments of a loader that may give a rank its part


def loader(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that makes the sampler of the loop around a statement, or else its loader.

    ``detail``: "order": rather the call that sets the order of an epoch; "uncalled": the condition around it, or the loop over
    the epochs; "evaluation": that of the evaluation with Lightning; "itself": the loader, also if it has a sampler.
    """
    for call in in_order(calls(source.tree, "set_epoch")):
        if detail in ("order", "uncalled") or any(RANK.search(ast.unparse(each)) for each in call.args):
            alone = (each.lineno for each in source.above(call) if isinstance(each, ast.If) and len(each.body) == 1)
            return next(alone, call.lineno) if detail == "uncalled" else call.lineno
    if detail == "uncalled" and (line := _loop_of_epochs(source, start)):
        return line
    for made, statement in _loaders(source, start, detail == "evaluation"):
        # A Trainer of transformers does not divide the loader that a method of the program returns.
        whole = detail == "itself" or "get_train_dataloader" in source.functions
        named = () if whole else ("sampler", "batch_sampler")
        given = [each.value for each in made.keywords if each.arg in named]
        return first(source.trace([Value(each, statement) for each in given]), _makes_sampler) or statement.lineno
    return None


def _loop_of_epochs(source: Source, start: ast.stmt) -> int | None:
    """The loop over the epochs around a statement, or around the only call of its function; or any loop around a loop."""
    calling = source.calls_of(source.scopes(start)[0])
    for inner in (start, *(calling if len(calling) == 1 else ())):
        for each in source.above(inner):
            if isinstance(each, ast.For) and "epoch" in ast.unparse(each.target).lower():
                return each.lineno
    around = (each.lineno for each in source.above(start) if isinstance(each, ast.For | ast.While))
    return next(around, None) if isinstance(start, ast.For) else None


def _loaders(source: Source, start: ast.stmt, evaluation: bool) -> Iterator[tuple[ast.Call, ast.stmt]]:
    """Yield the calls that make a loader behind the loop around a statement, and their statements."""
    loops = [each for each in (start, *source.above(start)) if isinstance(each, ast.For | ast.AsyncFor)]
    begin = [header(each) for each in loops] or [header(start)]
    if any(calls(start, "fit", "train", "validate", "test")):
        training = ("train_dataloader", "get_train_dataloader")  # of Lightning, and of transformers
        names = ("val_dataloader", "test_dataloader") if evaluation else training
        own = [each for name in names for each in source.functions.get(name, [])]
        returns = [
            Value(each, each) for function in own for each in source.within(function) if isinstance(each, ast.Return)
        ]
        begin = returns or ([] if evaluation else begin)
    for value in source.trace(begin):
        for made in calls(value.expression):
            if name_of(made.func).lower().endswith("loader"):
                yield made, value.statement


def of_rank_alone(source: Source, start: ast.stmt, detail: str) -> int | None:
    """What makes an argument of the sampler of the loop around a statement: ``detail``, "seed" or "rank".

    A seed counts if it depends on the rank, and a rank if it does not come from the process group.
    """
    for made, statement in _loaders(source, start, False):
        samplers = source.trace([Value(each.value, statement) for each in made.keywords if "sampler" in str(each.arg)])
        for value in samplers:
            for call in (each for each in calls(value.expression) if name_of(each.func).endswith("Sampler")):
                given = [Value(each.value, value.statement) for each in call.keywords if each.arg == detail]
                for behind in (*source.trace(given, depth=3), *_set(source, given)):
                    if behind.statement is not value.statement and _is_own(behind, detail):
                        return behind.statement.lineno
    return None


def _set(source: Source, given: list[Value]) -> Iterator[Value]:
    """Yield what a file assigns to attributes that are given, such as ``args.seed``."""
    texts = {ast.unparse(each.expression) for each in given if isinstance(each.expression, ast.Attribute)}
    for each in ast.walk(source.tree):
        if isinstance(each, ast.Assign | ast.AugAssign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            if any(ast.unparse(target) in texts for target in targets):
                yield Value(each.value, each)


def _is_own(value: Value, detail: str) -> bool:
    if detail == "seed":
        return of_rank(value)
    return isinstance(value.statement, ast.Assign) and not any(calls(value.expression, "get_rank"))


def undivided(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The argument of a Trainer of Lightning that keeps it from dividing the samples, if no sampler of the program does."""
    if any(name_of(call.func).endswith("Sampler") for call in calls(source.tree)):
        return None
    for call in calls(source.tree, "Trainer"):
        for each in call.keywords:
            if each.arg == "use_distributed_sampler" and isinstance(each.value, ast.Constant) and not each.value.value:
                return each.value.lineno
    return None


def listed(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that makes the list of indices of the Subset behind a statement; in a loop, the one that changes the list."""
    for value in source.trace([header(start)]):
        for made in calls(value.expression, "Subset"):
            given = [each.value for each in made.keywords if each.arg == "indices"] + made.args[1:2]
            if given and isinstance(given[0], ast.Name):
                return _list_made(source, given[0].id, value.statement)
    return None


def _list_made(source: Source, name: str, at: ast.stmt) -> int | None:
    loops = [each for each in source.above(at) if isinstance(each, ast.For | ast.While)]
    changes = [
        each.lineno for loop in loops for each in source.within(loop) if each is not at and any(assigned(each, name))
    ]
    if changes:
        return changes[-1]
    for value in source.definitions(name, source.scopes(at)[0], at)[-1:]:
        if isinstance(value.expression, ast.Name) and not any(assigned(value.statement, name)):
            return _list_made(source, value.expression.id, value.statement)
        return value.statement.lineno
    return None


def _makes_sampler(value: Value) -> bool:
    return any(name_of(call.func).endswith("Sampler") for call in calls(value.expression))


def dealt(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement of a sampler or a data set of the program that gives a rank its part, for the loop at a statement."""
    for made, statement in _loaders(source, start, False):
        given = [each.value for name in DIVIDED for each in made.keywords if each.arg == name] + made.args[:1]
        for value in source.trace([Value(each, statement) for each in given]):
            if line := _dealing(source, value):
                return line
    return None


def _dealing(source: Source, made: Value) -> int | None:
    """In the ``__iter__`` of a class of the program of which an object is made: what mentions the rank, or takes each nth."""
    parts = [header(each) for function in _iterations(source, made) for each in source.within(function)]
    return first(parts, of_rank) or first(parts, _takes_each_nth)


def undealt(source: Source, start: ast.stmt, detail: str) -> int | None:
    """What the ``__iter__`` of a sampler of the program returns, if it gives no rank a part, for the loop at a statement."""
    for made, statement in _loaders(source, start, False):
        given = [Value(each.value, statement) for each in made.keywords if each.arg in ("sampler", "batch_sampler")]
        for value in source.trace(given):
            for function in _iterations(source, value):
                ends = [each for each in source.within(function) if any(map(_gives, ast.walk(header(each).expression)))]
                return None if _dealing(source, value) or not ends else ends[-1].lineno
    return None


def _gives(node: ast.AST) -> bool:
    return isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)


def _iterations(source: Source, made: Value) -> list[ast.AST]:
    """The ``__iter__`` of the classes of the program of which an object is made."""
    names = {name_of(call.func) for call in calls(made.expression)}
    owners = (each for each in ast.walk(source.tree) if isinstance(each, ast.ClassDef) and each.name in names)
    return [each for owner in owners for each in owner.body if isinstance(each, Function) and each.name == "__iter__"]


def _takes_each_nth(value: Value) -> bool:
    return any(isinstance(each, ast.Slice) and each.step for each in ast.walk(value.expression))
