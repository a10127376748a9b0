"""Evidence in files, so that rules can judge programs again without running them.

A file contains many similar versions of a few programs, so equal values are stored only once.
"""

import dataclasses
import importlib
import io
import lzma
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from workshop.check.evidence import misuses
from workshop.check.evidence.events import Event
from workshop.check.evidence.process import Process
from workshop.errors import UserError
from workshop.files import write_atomically

LONGEST = 10_000  # characters kept at the start and at the end of a text
TICKS = 1024  # times are rounded to 1/1024 s: binary fractions take less space than decimal ones
KEPT = 4  # values kept per sketch: fewer than recorded, but equal sketches stay equal
CUT = "\n[...]\n"


@dataclass
class Recorded:
    """The evidence of one program."""

    name: str  # of the program or the version of it
    offers: tuple[str, ...] = ()  # names of the scenarios that its bench offered, in order
    made: dict[str, Any] = field(default_factory=dict)  # the results by scenario name
    unavailable: dict[str, str] = field(default_factory=dict)  # by scenario name, why it could not be made


def write(path: Path, recorded: Iterable[Recorded], hide: Callable[[str], str] = str) -> None:
    """Write evidence to a file; ``hide`` removes what is specific to this machine from a text, such as paths."""
    shared = _Shared(hide)
    plain = [shared.plain(each) for each in recorded]
    content = pickle.dumps({_name(kind): _fields(kind) for kind in shared.kinds}, 5) + pickle.dumps(plain, 5)
    size = max(1 << 20, 1 << len(content).bit_length())  # finds repetitions in the whole content
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": min(size, 1 << 28)}]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lzma.compress(content, filters=filters))


def read(path: Path, again: str) -> dict[str, Recorded]:
    """Read the evidence in a file, by program name; ``again`` is the command that records it again."""
    try:
        content = io.BytesIO(lzma.decompress(path.read_bytes()))
        kinds: dict[str, int] = _Reader(content).load()
    except FileNotFoundError:
        raise UserError(f"{path}: no evidence was recorded; record it: {again}") from None
    except (lzma.LZMAError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is damaged ({error}); record again: {again}") from None
    if any(fields != _fields_now(name) for name, fields in kinds.items()):
        raise UserError(f"{path} contains evidence of a different version of the check; record again: {again}")
    return {each.name: each for each in _Reader(content).load()}


def all_events() -> dict[str, type[Event]]:
    """Return each kind of event by its name."""
    assert misuses  # it declares some of them
    return {each.__name__: each for each in Event.__subclasses__()}


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _fields(kind: Any) -> int:
    """A checksum of the fields of a dataclass."""
    fields = ", ".join(f"{part.name}: {part.type}" for part in dataclasses.fields(kind))
    # Older files name the module in which the class was then.
    return zlib.crc32(fields.replace("evidence.process.Process", "evidence.run.Process").encode())


@cache
def _fields_now(name: str) -> int | None:
    """The checksum of a dataclass that a file contains; None: there is no such dataclass."""
    module, _, kind = name.rpartition(".")
    found = getattr(importlib.import_module(module), kind, None)
    return _fields(found) if found else None


class _Reader(pickle.Unpickler):
    """Unpickles only objects of the workshop."""

    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith("workshop."):
            raise pickle.UnpicklingError(f"{module}.{name} is no evidence")
        return super().find_class(module, name)


class _Shared:
    """Copies objects so that equal parts are one object, which pickle writes once. (No rule changes a shared list.)"""

    def __init__(self, hide: Callable[[str], str]) -> None:
        self.known: dict[object, Any] = {}
        self.kinds: set[type] = set()  # of the dataclasses
        self.text = cache(lambda text: _cut(hide(text)))  # hide first, because a path may cross the cut

    def plain(self, value: Any) -> Any:
        """Copy a value: dataclasses without cached properties, floats in single precision, texts cut and hidden."""
        if isinstance(value, float):
            with suppress(OverflowError):
                value = struct.unpack("f", struct.pack("f", value))[0]
        if isinstance(value, int | float | str | None):
            return self._one(self.text(value) if isinstance(value, str) else value)
        if isinstance(value, Process):
            timed = ((self._one(round(seconds * TICKS) / TICKS), self.plain(event)) for seconds, event in value.events)
            return self._instance(value, events=[self._one(pair, pair) for pair in timed])
        if dataclasses.is_dataclass(value):
            return self._instance(value)
        if isinstance(value, Mapping):
            return {self.plain(key): self.plain(each) for key, each in value.items()}
        if isinstance(value, set | frozenset):
            return type(value)(self.plain(each) for each in value)
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], float) and isinstance(value[1], list):
            norm, values = value  # a sketch of a tensor
            value = (norm, values[:: max(1, len(values) // KEPT)][:KEPT])
        if type(value) in (list, tuple):
            parts = [self.plain(each) for each in value]
            return self._one(type(value)(parts), parts)
        raise TypeError(f"evidence cannot hold a {type(value).__name__}")

    def _instance(self, value: Any, **given: Any) -> Any:
        self.kinds.add(type(value))
        names = [part.name for part in dataclasses.fields(value)]
        parts = {name: given[name] if name in given else self.plain(getattr(value, name)) for name in names}
        copied = object.__new__(type(value))
        vars(copied).update(parts)
        return self._one(copied, parts.values()) if value.__dataclass_params__.frozen else copied

    def _one(self, value: Any, parts: Iterable[object] | None = None) -> Any:
        """Return the first of all equal values. Values with parts are equal if their parts are the same objects in ``known``."""
        key = (type(value), value) if parts is None else (type(value), *map(id, parts))
        return self.known.setdefault(key, value)


def _cut(text: str) -> str:
    return f"{text[:LONGEST]}{CUT}{text[-LONGEST:]}" if len(text) > 2 * LONGEST + len(CUT) else text
