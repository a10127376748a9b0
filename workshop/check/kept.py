"""Find what a program saves in a checkpoint, and what it restores from one: finders for ``origins.py``."""

import ast
import re

from workshop.check.definitions import (
    Function,
    Source,
    Value,
    assigned,
    calls,
    first,
    header,
    in_order,
    is_name,
    name_of,
    names_in,
    names_stored,
)
from workshop.check.own_values import RANK

HOOKS = ("on_fit_start", "on_train_start", "on_train_begin")  # they run after a Trainer has loaded a checkpoint
JOINS = ("cat", "concat", "concatenate", "stack", "vstack", "hstack")


def restored(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The last statement of the block in which a checkpoint is loaded that uses the checkpoint.

    ``detail``: the name of a variable; a statement that sets its state is closer.
    """
    block = source.parents[start]
    own = source.scopes(start)[0]
    for call in calls(own, "set_state", "setstate") if detail else ():
        if call.lineno >= start.lineno and isinstance(call.func, ast.Attribute) and is_name(call.func.value, detail):
            return call.lineno
    loaded = [name for target in getattr(start, "targets", []) for name in names_stored(target)]
    after = [each for each in ast.iter_child_nodes(block) if isinstance(each, ast.stmt) and each.lineno >= start.lineno]
    using = [each for each in after if any(name in loaded for name in names_in(each))]
    return using[-1].lineno if using else None


def made(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The last assignment to a variable in a function."""
    statements = source.within(source.scopes(start)[0])
    found = [each.lineno for each in statements if isinstance(each, ast.Assign) and any(assigned(each, detail))]
    return found[-1] if found else None


def state(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that asks an optimizer for the state that is saved."""

    def asks(value: Value) -> bool:
        return any("opt" in ast.unparse(call.func).lower() for call in calls(value.expression, "state_dict"))

    return first(source.trace([header(start)]), asks)


def unread(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The last assignment to a variable before a checkpoint is loaded, if a dictionary of the file saves this variable."""
    values = (each for node in ast.walk(source.tree) if isinstance(node, ast.Dict) for each in node.values)
    if not any(is_name(each, detail) for each in values):
        return None
    statements = [each for each in source.within(source.scopes(start)[0]) if each.lineno < start.lineno]
    found = [each.lineno for each in statements if any(assigned(each, detail))]
    return found[-1] if found else None


def saved(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The dictionary that a statement saves."""
    for value in source.trace([header(start)]):
        for each in ast.walk(value.expression):
            if isinstance(each, ast.Dict):
                return each.lineno
    return None


def filled(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The dictionary that a call fills from a checkpoint, such as ``fabric.load(path, state)`` or ``dcp.load(state, ...)``."""
    loads = [call for call in calls(start, "load") if len(call.args) + len(call.keywords) > 1]
    return saved(source, start, detail) if isinstance(start, ast.Expr) and loads else None


def key(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The line that gives a value to a key of the dictionary that a statement saves."""
    for value in source.trace([header(start)]):
        keys = [key for each in ast.walk(value.expression) if isinstance(each, ast.Dict) for key in each.keys if key]
        keys += [each.slice for each in ast.walk(value.statement) if isinstance(each, ast.Subscript)]
        for key in keys:
            if isinstance(key, ast.Constant) and key.value == detail:
                return key.lineno
    return None


def stateful(source: Source, start: ast.stmt, detail: str) -> int | None:
    """What ``state_dict`` returns in a class of the program that has an attribute with such a name, but does not save it."""
    for owner in (each for each in ast.walk(source.tree) if isinstance(each, ast.ClassDef)):
        methods = {each.name: each for each in owner.body if isinstance(each, Function)}
        saving = methods.pop("state_dict", None)
        names = {
            name_of(node) for each in methods.values() for node in ast.walk(each) if isinstance(node, ast.Attribute)
        }
        if saving and any(re.search(detail, name) for name in names) and not re.search(detail, ast.unparse(saving)):
            returns = [each.lineno for each in source.within(saving) if isinstance(each, ast.Return)]
            return returns[-1] if returns else saving.lineno
    return None


def held(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The first assignment to the attribute of a class of the program that is saved under a key."""
    names: set[str] = set()  # of the object that is saved, or of its class
    for each in ast.walk(source.tree):
        for name, value in zip(each.keys, each.values, strict=True) if isinstance(each, ast.Dict) else ():
            if isinstance(name, ast.Constant) and name.value == detail:
                names |= {name_of(part) for part in ast.walk(value) if isinstance(part, ast.Name | ast.Attribute)}
    for each in ast.walk(source.tree):
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
            names |= {name_of(each.value.func) for target in each.targets if name_of(target) in names}
    for owner in (each for each in ast.walk(source.tree) if isinstance(each, ast.ClassDef) and each.name in names):
        methods = [each for each in owner.body if isinstance(each, Function)]
        saving = [each for each in methods if each.name == "state_dict"]
        own = {name for each in saving for name in names_in(each) if name.startswith("self.")} or names
        found = [
            each for one in methods for each in source.within(one) if any(any(assigned(each, name)) for name in own)
        ]
        if found:
            return found[0].lineno
    return None


def anew(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement in a hook at the start of the training that replaces, without a condition, what load_state_dict() has set."""
    for owner in (each for each in ast.walk(source.tree) if isinstance(each, ast.ClassDef)):
        methods = {each.name: each for each in owner.body if isinstance(each, Function)}
        loading = methods.get("load_state_dict")
        stored = [each for each in ast.walk(loading) if isinstance(each, ast.Attribute)] if loading else []
        names = {f"self.{each.attr}" for each in stored if isinstance(each.ctx, ast.Store)}
        for each in (statement for hook in HOOKS if hook in methods for statement in methods[hook].body):
            if any(any(assigned(each, name)) for name in names):
                return each.lineno
    return None


def joined(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that joins the parts of what a statement saves."""
    return first(source.trace([header(start)]), lambda value: any(calls(value.expression, *JOINS)))


def trains(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that lets the module of a parameter with this name be trained."""
    *_, module = ["", *detail.split(".")[:-1]]
    for each in ast.walk(source.tree):
        if (
            isinstance(each, ast.Call)
            and name_of(each.func) == "requires_grad_"
            and isinstance(each.func, ast.Attribute)
        ):
            target: ast.AST = each.func.value
        elif isinstance(each, ast.Assign) and any(name_of(target) == "requires_grad" for target in each.targets):
            target = each.targets[0]
        else:
            continue
        if module and any(isinstance(part, ast.Attribute) and part.attr == module for part in ast.walk(target)):
            return each.lineno
    return None


def loading(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The call of load_state_dict() of the object with this name, or with this key of the checkpoint."""
    for call in in_order(calls(source.tree, "load_state_dict", "set_state_dict")):
        if detail in ast.unparse(call).lower():
            return call.lineno
    return None


def of_some(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The condition about the rank under which the state of a loaded checkpoint is restored."""
    for call in in_order(calls(source.scopes(start)[0], "load_state_dict")):
        for each in source.above(call) if call.lineno > start.lineno else ():
            if isinstance(each, ast.If) and RANK.search(ast.unparse(each.test)) and each not in source.above(start):
                return each.lineno
    return None


def of_first(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that restores the first entry of a list in a checkpoint, such as ``saved["states"][0]``."""
    loads = (each for each in ast.walk(source.tree) if isinstance(each, ast.Assign) and any(calls(each.value, "load")))
    loaded = {name for each in loads for target in each.targets for name in names_stored(target)}
    for each in ast.walk(source.tree):
        if isinstance(each, ast.Subscript) and isinstance(each.value, ast.Subscript):
            first = isinstance(each.slice, ast.Constant) and each.slice.value == 0
            if first and name_of(each.value.value) in loaded:
                return each.lineno
    return None


def unpersistent(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The registration of a buffer with this name that state_dict() leaves out."""
    for call in in_order(calls(source.tree, "register_buffer")):
        given = [*call.args[2:], *(each.value for each in call.keywords if each.arg == "persistent")]
        out = any(isinstance(each, ast.Constant) and each.value is False for each in given)
        if out and call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == detail:
            return call.lineno
    return None


def rescaled(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that multiplies the learning rate of an optimizer after a checkpoint is loaded."""
    for each in source.within(source.scopes(start)[0]):
        target = each.target if isinstance(each, ast.AugAssign) and each.lineno > start.lineno else None
        key = target.slice if isinstance(target, ast.Subscript) else None
        if isinstance(key, ast.Constant) and key.value == "lr":
            return each.lineno
    return None


def tag(source: Source, start: ast.stmt, detail: str) -> int | None:
    """The statement that makes the tag of a checkpoint."""

    def makes(value: Value) -> bool:
        return isinstance(value.expression, ast.JoinedStr | ast.BinOp | ast.Call)

    saves = list(calls(start, "save_checkpoint"))
    given = [each.value for call in saves for each in call.keywords if each.arg == "tag"]
    given += [each for call in saves for each in call.args[1:2]]
    return first(source.trace([Value(each, start) for each in given]), makes)
