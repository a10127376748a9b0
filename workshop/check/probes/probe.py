"""What a probe is: it observes one thing in each process of a checked program, and changes nothing that is computed."""

import dataclasses
import importlib
import importlib.util
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

from workshop.check.evidence.events import Event
from workshop.check.probes.patching import Function, Patches, after, around, before, on, replacement
from workshop.check.probes.recorder import Recorder

__all__ = ["Function", "Probe", "after", "around", "before", "on"]


class Probe:
    """Its methods with ``@before``, ``@after`` or ``@around`` note an event when the program calls a function.

    What the others do inside the program stands in ``with self.recorder.guard``: an error in it does not reach the program.
    """

    writes: ClassVar[tuple[type[Event], ...]] = ()  # the kinds of events that it notes
    library: ClassVar[str] = ""  # the package whose programs it observes; "": it observes every program
    package: ClassVar[str] = ""  # what it imports only when it is used; "": the library
    installed = False  # what cannot be removed looks here whether it still is

    def __init__(self, recorder: Recorder):
        self.recorder, self.patches = recorder, Patches()
        self.clear()
        recorder.after_fork.append(self.clear)

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        """Import the package in the process that the program's are forked from; ``on_cpu``: GPUs are hidden from them."""
        cls._package()

    @classmethod
    def _package(cls) -> Any:
        name = cls.package or cls.library
        found = name and importlib.util.find_spec(name.partition(".")[0])
        return importlib.import_module(name) if found else None

    def clear(self) -> None:
        """Forget what was seen: at the beginning, and in each process that is forked from this one."""

    def install(self) -> None:
        """Begin to observe this process: let the decorated methods replace their functions."""
        self.installed, package = True, self._package()
        for method in [getattr(self, name) for name in dir(type(self))]:
            for when, owner, names, named in getattr(method, "hooks", ()):
                if owner is None:
                    getattr(self.recorder, when).append(method)
                elif isinstance(owner, FunctionType):
                    owner = owner(package) if package else None  # it may not be installed
                for name in names if owner else ():
                    if original := getattr(owner, name, None):
                        call = partial(method, name) if named else method
                        self.patches.set(owner, name, replacement(self.recorder, when, call, original))

    def undo(self) -> None:
        """Put everything back that ``install`` has replaced."""
        self.installed = False
        self.patches.close()

    def note_here(self, event: Event) -> None:
        """Note an event with the line of the program that we are called from."""
        with self.recorder.guard:
            self.recorder.note(dataclasses.replace(event, where=self.recorder.where()))
