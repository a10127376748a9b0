"""Find the condition or the call that leads to a statement: finders for ``origins.py``."""

import ast
import itertools
import re

from workshop.check.definitions import Function, Source, Value, assigned, calls, first, header, name_of, names_in
from workshop.check.own_values import ASKS_RANK

# Methods of tensors and models, and functions, that change parameters.
CHANGES = ("copy_", "lerp_", "mul_", "load_state_dict", "_foreach_copy_", "_foreach_lerp_", "_foreach_mul_")
# Methods of a callback of Lightning in which an average is updated or begins to be used, or a checkpoint is made or read.
KEEPS = (
    "on_fit_start",
    "on_train_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_save_checkpoint",
    "on_load_checkpoint",
)


def condition(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The condition around the closest call of a method, after a line where it was not called."""
    scope = source.scopes(start)[0]
    found = [each for each in calls(scope, detail) if each.lineno >= start.lineno]
    for call in sorted(found, key=lambda each: each.lineno):
        return next((each.lineno for each in source.above(call) if isinstance(each, ast.If)), None)
    return None


def gate(source: Source, start: ast.stmt, detail: str) -> int | None:
    """What decides whether a statement runs: the condition around it, or around the only call of its function.

    ``detail``: "%": rather the statement that computes the condition with a remainder; "alone": only a condition
    that asks for the rank, or that has no other statement.
    """
    inner = start
    for _ in range(2):
        function = source.scopes(inner)[0]
        around = itertools.takewhile(lambda each, end=function: each is not end, source.above(inner))  # type: ignore[misc]
        conditions = (each for each in around if isinstance(each, ast.If))
        condition = next((each for each in conditions if "__name__" not in names_in(each.test)), None)
        if condition and not (detail == "alone" and len(condition.body) > 1 and not _asks_rank(condition)):
            remainder = first(source.trace([header(condition)]), _has_remainder) if detail == "%" else None
            return remainder or condition.lineno
        calling = source.calls_of(function)
        if len(calling) != 1:
            return None
        inner = calling[0]
    return None


def ungated(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The only call, without a condition about the rank, of the function that contains a statement; it has other calls too."""
    found = source.calls_of(source.scopes(start)[0])
    free = [each for each in found if not any(_asks_rank(above) for above in source.above(each))]
    return free[0].lineno if len(free) == 1 < len(found) else None


def _asks_rank(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and bool(ASKS_RANK.search(ast.unparse(node.test)))


def rank_gate(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The condition about the rank around a statement."""
    return next((each.lineno for each in source.above(start) if isinstance(each, ast.If) and _asks_rank(each)), None)


def only_once(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The only call of a method without arguments, if it is not in a loop."""
    found = [call for call in calls(source.tree, detail) if not call.args]
    loops = [each for call in found for each in source.above(call) if isinstance(each, ast.For | ast.While)]
    return found[0].lineno if len(found) == 1 and not loops else None


def passed(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The only call of the function that contains a statement.

    ``detail``: "generator": if it is a generator function; "class": if it is the ``__init__`` of a class, the only call of this.
    """
    function = source.scopes(start)[0]
    if detail == "class":
        owner = source.parents.get(function)
        if not isinstance(owner, ast.ClassDef) or getattr(function, "name", "") != "__init__":
            return None
        made = [call.lineno for call in calls(source.tree, owner.name)]
        return made[0] if len(made) == 1 else None
    found = source.calls_of(function)
    yields = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(function))
    return found[0].lineno if len(found) == 1 and (yields or not detail) else None


def without_gradients(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The only call, without gradients, of the function that contains a statement, if the function has other calls too."""
    found = source.calls_of(source.scopes(start)[0])
    blocks = ((each, above) for each in found for above in source.above(each) if isinstance(above, ast.With))
    free = {each.lineno for each, block in blocks if any(calls(header(block).expression, "no_grad", "inference_mode"))}
    return free.pop() if len(free) == 1 < len(found) else None


def in_place(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The first statement that changes a variable, or a part of it, in place."""
    for each in sorted(
        (node for node in ast.walk(source.tree) if isinstance(node, ast.stmt)), key=lambda each: each.lineno
    ):
        if isinstance(each, ast.AugAssign) and re.search(rf"\b{detail}\b", ast.unparse(each.target)):
            return each.lineno
        call = each.value if isinstance(each, ast.Expr | ast.Assign) else None
        changed = call.func if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
        if changed and re.search(r"[a-z]_$", changed.attr) and re.search(rf"\b{detail}\b", ast.unparse(changed.value)):
            return each.lineno
    return None


def owner(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that makes the only object of the class that has this parameter, if this is no model that is wrapped."""
    for each in ast.walk(source.tree):
        if isinstance(each, ast.ClassDef) and any(
            any(assigned(inner, f"self.{detail}")) for inner in ast.walk(each) if isinstance(inner, ast.stmt)
        ):
            made = list(calls(source.tree, each.name))
            wrapped = any(
                "Parallel" in name_of(above.func) or name_of(above.func) == "DDP"
                for call in made
                for above in source.above(call)
                if isinstance(above, ast.Call)
            )
            return made[0].lineno if len(made) == 1 and not wrapped else None
    return None


def hook(source: Source, start: ast.stmt, detail: str) -> int | None:
    """For the call of ``fit`` of a Trainer: the only condition about the rank in a method that changes parameters.

    ``detail``: "back": rather the only method of a callback that puts back what the callback has kept.
    """
    if not any(calls(start, "fit")):
        return None
    functions = [each for nodes in source.functions.values() for each in nodes if any(calls(each, *CHANGES))]
    if detail == "back":
        own = [each for each in functions if each.name.startswith("on_") and each.name not in KEEPS]
        return own[0].lineno if len(own) == 1 else None
    asking = [each.lineno for function in functions for each in source.within(function) if _asks_rank(each)]
    asking += [each.lineno for each in functions if any("rank_zero" in ast.unparse(one) for one in each.decorator_list)]
    return asking[0] if len(asking) == 1 else None


def argument(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that passes a function the model that it calls; of several, one whose function also calls ``detail``."""
    function = source.scopes(start)[0]
    if not isinstance(function, Function):
        return None
    parameters = {each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    if not any(isinstance(each.func, ast.Name) and each.func.id in parameters for each in calls(start)):
        return None
    passing = source.calls_of(function)
    return next((each.lineno for each in passing if any(calls(source.scopes(each)[0], detail))), None)


def meets(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The call that leads to a statement, in the closest function that has called before what is at the line ``detail``."""
    other = source.statement(int(detail))
    ways, before = _callers(source, start), _callers(source, other) if other else {}
    for function, lines in ways.items():
        if function in before:
            return min((line for line in lines if line > min(before[function])), default=min(lines))
    return None


def _callers(source: Source, statement: ast.stmt) -> dict[ast.AST, list[int]]:
    """The functions that contain or call a statement, the closest first, and the lines in them that lead to it."""
    found, level = dict[ast.AST, list[int]](), [statement]
    while level:
        new: dict[ast.AST, list[int]] = {}
        for each in level:
            new.setdefault(source.scopes(each)[0], []).append(each.lineno)
        new = {scope: lines for scope, lines in new.items() if scope not in found}
        found |= new
        level = [each for scope in new for each in source.calls_of(scope)]
    return found


def _has_remainder(value: Value) -> bool:
    return any(isinstance(each, ast.Mod) for each in ast.walk(value.expression))
