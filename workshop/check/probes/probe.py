"""The base of all probes: each observes one aspect in each process of a program, and changes no result."""

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
    """Methods with ``@before``, ``@after`` or ``@around`` record an event when the program calls a function.

    Put other code that runs inside the program into ``with self.recorder.guard``, so that no error of it reaches the program.
    """

    writes: ClassVar[tuple[type[Event], ...]] = ()  # the kinds of events that it records
    library: ClassVar[str] = ""  # observes only programs that import this library; "": all programs
    named: ClassVar[str] = ""  # a regular expression of how a program names the library without an import of it
    package: ClassVar[str] = ""  # the package that it imports when it is used; "": the library
    installed = False  # for hooks that cannot be removed

    def __init__(self, recorder: Recorder):
        self.recorder, self.patches = recorder, Patches()
        self.clear()
        recorder.after_fork.append(self.clear)

    @classmethod
    def prepare(cls, on_cpu: bool) -> None:
        """Import the package in the process that forks the processes of the program; ``on_cpu``: their GPUs are hidden."""
        cls._package()

    @classmethod
    def _package(cls) -> Any:
        name = cls.package or cls.library
        found = name and importlib.util.find_spec(name.partition(".")[0])
        return importlib.import_module(name) if found else None

    def clear(self) -> None:
        """Reset the state of the probe: at the beginning, and in each forked process."""

    def install(self) -> None:
        """Begin to observe this process: replace the functions of the decorated methods."""
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
        """Restore everything that ``install`` has replaced."""
        self.installed = False
        self.patches.close()

    def note_here(self, event: Event) -> None:
        """Record an event with the line of the program that led to this call."""
        with self.recorder.guard:
            self.recorder.note(dataclasses.replace(event, where=self.recorder.where()))
