"""Python runs this file at its start if PYTHONPATH contains the folder. With ``import torch``, a process gets pretended GPUs."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as Python would, and calls ``start`` when its import is complete."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            from workshop.pretend.processes import start

            start()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("WORKSHOP_PRETEND"):
    sys.meta_path.insert(0, _AfterTorch())

# Python imports only the first sitecustomize that it finds, so this one runs the next, which may be one of the site.
_others = [folder for folder in sys.path if os.path.abspath(folder) != os.path.dirname(os.path.abspath(__file__))]
if _next := importlib.machinery.PathFinder.find_spec("sitecustomize", _others):
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
