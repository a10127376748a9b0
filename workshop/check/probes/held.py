"""What a data set holds: checksums of its contents, whether it is an endless stream, and whether an index names a sample."""

import ast
import inspect
import reprlib
import textwrap
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import ChainDataset

from workshop.check.probes.contents import UNREADABLE, attributes, content

DEPTH = 3  # of attributes within attributes
ENTRIES = 64  # of a list or a dictionary that are read
LONG = 16  # entries of a list, or values of a tensor, that may be data
VALUES = 4096  # of a tensor that are read
ENDLESS = ("count", "cycle")  # functions of itertools


def held(dataset: Any) -> dict[str, int]:
    """Return checksums of the tensors, arrays and long lists of a data set, by the names of the attributes that have them."""
    return dict(_held(dataset, "", DEPTH))


def _held(value: Any, name: str, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(value, torch.Tensor) or hasattr(type(value), "__array_interface__"):
        with suppress(*UNREADABLE, ValueError):
            flat = torch.as_tensor(value).detach().reshape(-1)
            some = flat[:: max(1, len(flat) // VALUES)].cpu().contiguous()  # it must exist while its bytes are read
            if len(flat) >= LONG:
                yield name, zlib.crc32(content(some))
    elif type(value).__module__.startswith("pandas."):
        if hasattr(value, "iloc") and len(value) >= LONG:
            yield name, zlib.crc32(repr(value.iloc[:ENTRIES].values.tolist()).encode(errors="replace"))
    elif type(value).__module__.startswith("pyarrow."):  # of a Dataset of Hugging Face
        if hasattr(type(value), "to_pydict") and len(value) >= LONG:
            yield name, zlib.crc32(repr(value.slice(0, ENTRIES).to_pydict()).encode(errors="replace"))
    elif isinstance(value, list | tuple):
        if len(value) >= LONG:
            yield name, zlib.crc32(repr([len(value), *map(_short, value[:ENTRIES])]).encode(errors="replace"))
        elif depth:
            for number, each in enumerate(value):
                yield from _held(each, f"{name}[{number}]", depth - 1)
    elif depth:
        inside = value if isinstance(value, dict) else attributes(value)
        for key, each in list(inside.items())[:ENTRIES]:
            yield from _held(each, f"{name}.{key}", depth - 1)


def _short(value: object) -> object:
    """A short text of an entry that is the same in each process."""
    if isinstance(value, list | tuple):
        return [_short(each) for each in value[:4]]
    if isinstance(value, torch.Tensor) or hasattr(type(value), "__array_interface__"):
        with suppress(*UNREADABLE, ValueError):
            return torch.as_tensor(value).detach().reshape(-1)[:LONG].tolist()
    return reprlib.repr(value) if isinstance(value, str | bytes | int | float | dict) else type(value).__name__


def begins_again(dataset: Any) -> bool:
    """Whether the ``__iter__`` of a data set has a loop without an end, so that it goes through its samples again and again."""
    function = _source_of(type(dataset), "__iter__")
    return function is not None and any(_has_no_end(each) for each in ast.walk(function))


def _has_no_end(loop: ast.AST) -> bool:
    if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and loop.test.value:
        return not any(isinstance(each, ast.Break | ast.Return) for each in ast.walk(loop))
    source = loop.iter if isinstance(loop, ast.For) else loop.value if isinstance(loop, ast.YieldFrom) else None
    return isinstance(source, ast.Call) and ast.unparse(source.func).rpartition(".")[2] in ENDLESS


def ignores_index(kind: type) -> bool:
    """Whether the ``__getitem__`` of a class of data sets does not use its index, but draws a sample."""
    function = _source_of(kind, "__getitem__")
    if function is None or len(function.args.args) != 2:
        return False
    index = function.args.args[1].arg
    return not any(isinstance(each, ast.Name) and each.id == index and _loads(each) for each in _in_order(function))


def _in_order(function: ast.FunctionDef) -> Iterator[ast.Name]:
    """The names in a function until its index gets another value."""
    index = function.args.args[1].arg
    for statement in function.body:
        names = [each for each in ast.walk(statement) if isinstance(each, ast.Name)]
        yield from names
        plain = isinstance(statement, ast.Assign | ast.AnnAssign)
        if plain and any(each.id == index and not _loads(each) for each in names):
            return


def _loads(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def _source_of(kind: type, method: str) -> ast.FunctionDef | None:
    with suppress(OSError, TypeError, SyntaxError, AttributeError):
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(kind, method))))
        return next((each for each in tree.body if isinstance(each, ast.FunctionDef)), None)
    return None


def ends_when_asked(dataset: Any) -> bool:
    """Whether len() of a data set would use up the data: ChainDataset goes through the generator of data sets that it got."""
    return isinstance(dataset, ChainDataset) and isinstance(dataset.datasets, Iterator)
