"""Python runs this file at its start if PYTHONPATH contains the folder. With ``import torch``, a process gets pretended GPUs."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


class _After(importlib.abc.MetaPathFinder):
    """Finds a package as Python would, and calls a function of ``pretended_processes`` when its import is complete."""

    def __init__(self, package, function):
        self.package, self.function, self.searching = package, function, False

    def find_spec(self, name, path, target=None):
        if name != self.package or self.searching:
            return None
        self.searching = True
        spec = importlib.util.find_spec(name)
        self.searching = False
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            from workshop.measure import pretended_processes as processes

            getattr(processes, self.function)()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("WORKSHOP_PRETEND"):
    sys.meta_path[:0] = [_After("torch", "start"), _After("deepspeed", "refuse_deepspeed")]

# Python imports only the first sitecustomize that it finds, so this one runs the next, which may be one of the site.
_others = [folder for folder in sys.path if os.path.abspath(folder) != os.path.dirname(os.path.abspath(__file__))]
if _next := importlib.machinery.PathFinder.find_spec("sitecustomize", _others):
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
