"""The version of the events: a checksum of their names and fields, which stands in each file of recorded evidence."""

import dataclasses
import inspect
import zlib

from workshop.check.evidence import events
from workshop.check.evidence.events import Event


def all_events() -> dict[str, type[Event]]:
    """Each kind of event by its name."""
    return {
        name: each
        for name, each in vars(events).items()
        if inspect.isclass(each) and issubclass(each, Event) and each is not Event
    }


def _schema() -> int:
    described = [
        f"{name}({', '.join(f'{part.name}: {part.type}' for part in dataclasses.fields(each))})"
        for name, each in sorted(all_events().items())
    ]
    return zlib.crc32("\n".join(described).encode())


SCHEMA = _schema()
