"""What the statements of a file of a program are: the names that each reads and sets, and where a loop or a function ends."""

import ast
from collections.abc import Iterator
from typing import NamedTuple


class Statement(NamedTuple):
    """A statement, or the head of a compound one (``for x in xs:``)."""

    node: ast.stmt
    first: int  # its lines
    last: int
    reads: tuple[str, ...]  # names such as "loader" and "state.step", in the order of the text
    scope: tuple[int, int]  # first and last line of its function; (0, 0) in the module


def statements(text: str) -> dict[int, Statement]:
    """Return the statement of each line of a file; none if Python cannot read it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, Statement] = {}
    for node, scope in _all(tree, (0, 0)):
        parts = _head(node)
        last = max([part.end_lineno or node.lineno for part in parts], default=node.lineno)
        reads = tuple(dict.fromkeys(name for part in parts for name in _read(part)))
        made = Statement(node, node.lineno, last, reads, scope)
        found |= dict.fromkeys(range(node.lineno, last + 1), made)
    return found


def _all(node: ast.AST, scope: tuple[int, int]) -> Iterator[tuple[ast.stmt, tuple[int, int]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child, scope
        within = scope
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            within = (child.lineno, child.end_lineno or child.lineno)
        yield from _all(child, within)


def _head(node: ast.stmt) -> list[ast.expr] | list[ast.stmt]:
    """The parts of a statement that run before its body."""
    match node:
        case ast.If() | ast.While():
            return [node.test]
        case ast.For() | ast.AsyncFor():
            return [node.iter]
        case ast.With() | ast.AsyncWith():
            return [item.context_expr for item in node.items]
        case ast.Match():
            return [node.subject]
        case ast.Try() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return []
    return [node]


def _read(part: ast.AST) -> Iterator[str]:
    """The names that an expression reads, also those of attributes; not those of functions that it calls."""
    if isinstance(part, ast.Attribute) and (name := dotted(part)):
        yield name
        if name.count(".") > 1:
            yield name.rpartition(".")[0]
        yield name.partition(".")[0]
        return
    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
        yield part.id
    if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
        yield part.target.id
    for child in ast.iter_child_nodes(part):
        yield from _read(child)


def dotted(node: ast.AST) -> str:
    """Return "a.b" for a name or an attribute of one, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (of := dotted(node.value)):
        return f"{of}.{node.attr}"
    return ""


def sets(node: ast.stmt, name: str) -> bool:
    """Whether a statement gives a name or an attribute a value."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        targets = [node.target]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        targets = [item.optional_vars for item in node.items if item.optional_vars]
    walked = [each for target in targets for each in ast.walk(target)]
    named = [each.target for each in ast.walk(node) if isinstance(each, ast.NamedExpr)]
    return any(dotted(each) == name for each in [*walked, *named])


def changes(node: ast.stmt, name: str) -> bool:
    """Whether a statement calls a method of a value and does nothing with the result, as in ``losses.append(loss)``."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and dotted(call.func.value) == name
