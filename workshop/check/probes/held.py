"""What a data set holds: checksums of its contents, and whether it is an endless stream."""

import ast
import inspect
import reprlib
import textwrap
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from workshop.check.probes.contents import UNREADABLE, content

DEPTH = 3  # of attributes within attributes
ENTRIES = 64  # of a list or a dictionary that are read
LONG = 16  # entries of a list, or values of a tensor, that may be data
VALUES = 4096  # of a tensor that are read
ENDLESS = ("count", "cycle")  # functions of itertools


def held(dataset: Any) -> dict[str, int]:
    """Return checksums of the tensors, arrays and long lists of a data set, by the names of the attributes that have them."""
    return dict(_held(dataset, "", DEPTH))


def _held(value: Any, name: str, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__"):
        with suppress(*UNREADABLE, ValueError):
            flat = torch.as_tensor(value).detach().reshape(-1)
            if len(flat) >= LONG:
                yield name, zlib.crc32(content(flat[:: max(1, len(flat) // VALUES)].cpu().contiguous()))
    elif type(value).__module__.startswith("pandas."):
        if hasattr(value, "iloc") and len(value) >= LONG:
            yield name, zlib.crc32(repr(value.iloc[:ENTRIES].values.tolist()).encode(errors="replace"))
    elif isinstance(value, list | tuple):
        if len(value) >= LONG:
            yield name, zlib.crc32(repr([len(value), *map(_short, value[:ENTRIES])]).encode(errors="replace"))
        elif depth:
            for number, each in enumerate(value):
                yield from _held(each, f"{name}[{number}]", depth - 1)
    elif depth:
        inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for key, each in list(inside.items())[:ENTRIES]:
            yield from _held(each, f"{name}.{key}", depth - 1)


def _short(value: object) -> object:
    """A short text of an entry that is the same in each process."""
    if isinstance(value, list | tuple):
        return [_short(each) for each in value[:4]]
    if isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__"):
        return list(_held(value, "", 0))
    return reprlib.repr(value) if isinstance(value, str | bytes | int | float | dict) else type(value).__name__


def begins_again(dataset: Any) -> bool:
    """Whether the ``__iter__`` of a data set has a loop without an end, so that it goes through its samples again and again."""
    with suppress(OSError, TypeError, SyntaxError):
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(dataset).__iter__)))
        for each in ast.walk(tree):
            if isinstance(each, ast.While) and isinstance(each.test, ast.Constant) and each.test.value:
                inside = list(ast.walk(each))
                if not any(isinstance(one, ast.Break | ast.Return) for one in inside):
                    return True
            if isinstance(each, ast.For) and isinstance(each.iter, ast.Call):
                name = ast.unparse(each.iter.func).rpartition(".")[2]
                if name in ENDLESS:
                    return True
    return False
