"""Run a module of the check in a different Python environment: ``python borrowed.py FOLDERS [MODULE ARGUMENTS]``.

FOLDERS says, as JSON, in which folder each package of the check is. Nothing else of these folders can be imported. The
packages of the environment come first, except for the check itself. Without MODULE, print the
environment and what it lacks.
"""

import importlib
import importlib.util
import json
import runpy
import sys
from importlib.machinery import ModuleSpec, PathFinder

OLDEST = (3, 11)  # Python; as in pyproject.toml


class Finder:
    """Finds packages, each in its own folder."""

    def __init__(self, folders: "dict[str, str]"):
        self.folders = folders

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Return where a package is; None for all others."""
        spec = PathFinder.find_spec(name, [self.folders[name]]) if name in self.folders else None
        if spec and spec.submodule_search_locations is not None:
            spec.submodule_search_locations = list(spec.submodule_search_locations)  # does not follow sys.path
        return spec


def missing(names: "list[str]") -> "list[str]":
    """Return what the check needs and this environment lacks, given the packages that can be borrowed."""
    found = [] if sys.version_info >= OLDEST else ["Python {}.{}".format(*OLDEST)]
    found += [] if importlib.util.find_spec("torch") else ["torch"]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            found.append(name)
    return found


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file
    folders = json.loads(sys.argv.pop(1))
    sys.meta_path.insert(0, Finder({"workshop": folders.pop("workshop")}))
    sys.meta_path.append(Finder(folders))
    if sys.argv[1:]:
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    else:
        print(json.dumps([sys.prefix, missing(list(folders))]))
