"""Where the names in a file of a program get their values: assignments, the arguments of calls, and what functions return."""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

DEPTH = 8  # definitions that are followed one after the other
MOST = 200  # expressions that are read
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
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Value:
    """An expression, and the statement that contains it."""

    expression: ast.AST
    statement: ast.stmt


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
            partial = isinstance(last.statement, ast.Expr | ast.AugAssign) or _sets_part(last.statement)
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

    def calls_of(self, function: ast.AST) -> list[ast.stmt]:
        """The statements of this file that call a function."""
        if not isinstance(function, Function):
            return []
        named = calls(self.tree, function.name)
        calling = [each for each in named if not set(names_in(each.func)) & self.imported - {function.name}]
        return [next(each for each in self.above(call) if isinstance(each, ast.stmt)) for call in calling]

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


def in_order(found: Iterable[ast.Call]) -> list[ast.Call]:
    """Calls in the order of the text."""
    return sorted(found, key=lambda each: (each.lineno, each.col_offset))


def assigned(statement: ast.stmt, name: str) -> Iterator[Value]:
    """Yield the value that a statement gives to a name; for a part of a tuple, only this part."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from _unpacked(target, statement.value, name, statement)
            if isinstance(target, ast.Subscript) and is_name(target.value, name):
                yield Value(statement.value, statement)
    elif isinstance(statement, ast.AnnAssign) and statement.value:
        yield from _unpacked(statement.target, statement.value, name, statement)
    elif isinstance(statement, ast.AugAssign) and is_name(_whole(statement.target), name):
        both = ast.BinOp(left=statement.target, op=statement.op, right=statement.value)
        yield Value(both, statement)
    elif isinstance(statement, ast.For | ast.AsyncFor):
        if any(is_name(each, name) for each in ast.walk(statement.target)):
            yield Value(statement.iter, statement)
    elif isinstance(statement, ast.With | ast.AsyncWith):
        for item in statement.items:
            if item.optional_vars and any(is_name(each, name) for each in ast.walk(item.optional_vars)):
                yield Value(item.context_expr, statement)
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr in SEEDS and is_name(function.value, name):
            yield Value(statement.value, statement)
    for walrus in ast.walk(statement) if not hasattr(statement, "body") else ():
        if isinstance(walrus, ast.NamedExpr) and is_name(walrus.target, name):
            yield Value(walrus.value, statement)


def _whole(target: ast.expr) -> ast.expr:
    """``losses`` of ``losses[step]``."""
    return target.value if isinstance(target, ast.Subscript) else target


def _sets_part(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and any(isinstance(each, ast.Subscript) for each in statement.targets)


def _unpacked(target: ast.AST, value: ast.expr, name: str, statement: ast.stmt) -> Iterator[Value]:
    if is_name(target, name):
        yield Value(value, statement)
    elif isinstance(target, ast.Tuple | ast.List):
        for index, part in enumerate(target.elts):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                yield from _unpacked(part, value.elts[index], name, statement)
            elif any(is_name(each, name) for each in ast.walk(part)):
                whole = ast.Subscript(value=value, slice=ast.Constant(index), ctx=ast.Load())
                yield Value(whole, statement)


def is_name(node: ast.AST, name: str) -> bool:
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


def names_stored(target: ast.AST) -> list[str]:
    """The names in the target of an assignment."""
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
