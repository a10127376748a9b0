"""Replacing functions of libraries with ones that note their calls, and putting the originals back."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

Function = Callable[..., Any]


class Removable(Protocol):
    """A hook that can be removed."""

    def remove(self) -> None:
        """Remove it."""


class Patches:
    """Replacements that ``undo`` takes back, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def wrap(self, owner: object, name: str, make: Callable[[Function], Function]) -> None:
        """Replace a function, if it exists.

        Args:
            owner: the module or class that has it.
            name: its name there.
            make: takes the original and returns the replacement, which gets the original's name and docstring.
        """
        original = getattr(owner, name, None)
        if original is not None:
            self.set(owner, name, functools.wraps(original)(make(original)))

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute with a value."""
        # An attribute that the owner inherits goes away again; getattr() would turn a staticmethod into a function.
        if name in vars(owner):
            self._undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
        else:
            self._undo.append(functools.partial(delattr, owner, name))
        setattr(owner, name, value)

    def hook(self, handle: Removable) -> None:
        """Let ``undo`` remove a hook of torch."""
        self._undo.append(handle.remove)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
