"""Importing torch faster."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

atexit.register(gc.unfreeze)  # else triton complains at the exit that its objects are still there


@contextmanager
def no_collections() -> Iterator[None]:
    """Import without the garbage collector: collections take a tenth of the time of torch's import, and find nothing.

    What was imported, about a million objects, is left out of later collections, too.
    """
    collecting, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        if collecting:
            gc.enable()
