"""The version of the events: a checksum of their names and fields, which stands in each file of recorded evidence."""

import dataclasses
import zlib
from typing import Any

from workshop.check.evidence.events import Event


def all_events() -> dict[str, type[Event]]:
    """Each kind of event by its name."""
    return {each.__name__: each for each in Event.__subclasses__()}


def described(kind: Any, name: str) -> str:
    """The name of a dataclass and its fields with their types."""
    return f"{name}({', '.join(f'{part.name}: {part.type}' for part in dataclasses.fields(kind))})"


SCHEMA = zlib.crc32("\n".join(described(kind, name) for name, kind in sorted(all_events().items())).encode())
