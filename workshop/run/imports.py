"""Import torch faster."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

atexit.register(gc.unfreeze)  # otherwise triton complains at exit that its objects still exist


@contextmanager
def no_collections() -> Iterator[None]:
    """Switch off the garbage collector during imports: it takes a tenth of the time of importing torch, and finds nothing.

    Later collections also skip the imported objects, which are about a million.
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
