"""Processes that a program starts as new interpreters (the methods "spawn" and "forkserver") are forked, to save the imports.

Each gets only what a new interpreter would get: its own random state and hashes of strings, the top level of the main file, which
it runs again as ``__mp_main__``, and the function and arguments, which the parent passes with pickle. A forked process would also
have what the program has put into its variables. (The other modules of the program are not imported again; only the seeds that
they set are set again.)
"""

import ast
import io
import multiprocessing.context
import multiprocessing.process
import os
import pickle
import random
import re
import runpy
import sys
import types
from multiprocessing import popen_fork, popen_spawn_posix, reduction, spawn
from pathlib import Path
from typing import Any

import torch

from workshop.check.probes.process import note_exception
from workshop.check.probes.recorder import Recorder
from workshop.pretend import devices

NO_GPU = "no-gpu"  # a file in the folder of the evidence: a process in place of a new interpreter cannot use the GPUs
FAILED = 70  # exit status if code of the check fails
OURS = "workshop."
# What registries say that already have a name: those of torch.library, transformers and many others.
REGISTERED = re.compile(r"\b(already|duplicated?|twice|multiple times|only once)\b", re.IGNORECASE)
SEEDING = re.compile(r"torch\.(cuda\.)?manual_seed(_all)?|(np|numpy)\.random\.seed|random\.seed")


class Salt:
    """What makes the hashes of strings in this process different from those in the others."""

    number = 0


def string_hash(value: Any) -> int:
    """In place of ``hash`` in the program: each new interpreter has its own hashes of strings, but forked ones share them."""
    if isinstance(value, (str, bytes)) and Salt.number and "PYTHONHASHSEED" not in os.environ:
        return hash((value, Salt.number))
    return hash(value)


def renew_random_state(entropy: int) -> None:
    """Seed torch (on all devices), NumPy and ``random``: with 0 from fresh entropy, as a new interpreter does."""
    if entropy:
        torch.manual_seed(entropy)
    else:
        torch.seed()
    devices.seeded.clear()  # only what the program seeds counts
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(entropy or None)
    random.seed(entropy or None)


class SpawnedProcess(multiprocessing.context.ForkProcess):
    """A forked process in place of a new interpreter."""

    _start_method = "spawn"  # also of the processes that it starts itself, such as the workers of a loader
    entropy = 0
    started = 0  # by this process; mp.spawn starts rank 0 first
    evidence: Path | None = None  # the folder of the evidence, if the processes may use the GPUs
    recorder: Recorder | None = None  # of this program

    @staticmethod  # multiprocessing calls it with a process of a different class
    def _Popen(process: Any) -> popen_fork.Popen:
        return _Popen(process)


class SpawnContext(multiprocessing.context.ForkContext):
    """The start methods "spawn" and "forkserver", with forked processes."""

    Process = SpawnedProcess


def fork_in_place_of_spawn() -> None:
    """Let the start methods "spawn" and "forkserver" fork; keep the default of this system."""
    contexts: dict[str, Any] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    default: Any = multiprocessing.context._default_context
    for name in ("spawn", "forkserver"):
        contexts[name] = SpawnContext()
        contexts[name]._name = name
    default._default_context = contexts[default._default_context._name]
    default._actual_context = None  # forget the choice of the process of the check


class _Popen(popen_fork.Popen):
    """Pickles a process as the method "spawn" does, and lets a forked process continue with what it unpickles."""

    DupFd = popen_spawn_posix._DupFd  # for tensors in shared memory and connections

    def duplicate_for_child(self, descriptor: int) -> int:
        """A descriptor for the child alone, which inherits this one too: what it unpickles closes the one that it gets."""
        copy = os.dup(descriptor)
        self.duplicates = [*getattr(self, "duplicates", []), copy]
        return copy

    def _launch(self, process: Any) -> None:
        spawn._check_not_importing_main()  # type: ignore[attr-defined] # main() is not under if __name__ == "__main__"
        stored = io.BytesIO()
        spawning: Any = self
        multiprocessing.context.set_spawning_popen(spawning)
        try:
            _Pickler(stored, pickle.HIGHEST_PROTOCOL).dump(process)
        finally:
            multiprocessing.context.set_spawning_popen(None)
        own = SpawnedProcess
        entropy = own.entropy and own.entropy + own.started
        own.started += 1
        process._bootstrap = lambda parent_sentinel: _begin(stored, entropy, own.started - 1, parent_sentinel)
        try:
            super()._launch(process)  # type: ignore[misc]
        finally:
            del process._bootstrap
            for each in getattr(self, "duplicates", []):
                os.close(each)


class _Pickler(reduction.ForkingPickler):
    """Passes objects of the check as they are, because a forked process has them: hooks of the probes, and pretended tensors."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, types.FunctionType):
            ours = value.__module__.startswith(OURS) and "<locals>" in value.__qualname__
        else:
            ours = kind.__module__.startswith(OURS) and kind is not SpawnedProcess
        if not ours:
            return NotImplemented
        _passed[id(value)] = value
        return _of_parent, (id(value),)


_passed: dict[int, Any] = {}


def _of_parent(number: int) -> Any:
    return _passed[number]


def run_main_again() -> None:
    """Run the top level of the main file as ``__mp_main__``; the code under ``if __name__ == "__main__"`` does not run.

    If that fails because what it registers in a library is already there, the main module of the parent is used.

    Raises:
        Exception: what the top level raises for any other reason, as it would in a new interpreter.
    """
    main: Any = sys.modules["__main__"]
    module = types.ModuleType("__mp_main__")
    name = getattr(main.__spec__, "name", "")
    ours = {"hash": string_hash}
    try:
        if not name:
            module.__dict__.update(runpy.run_path(main.__file__, ours, run_name="__mp_main__"))
        elif not name.endswith("__main__"):
            module.__dict__.update(runpy.run_module(name, ours, run_name="__mp_main__", alter_sys=True))
        else:  # of a package, which does not run again, also not in processes that this one spawns
            module.__spec__ = main.__spec__
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if not REGISTERED.search(str(error)):
            raise
        return
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    if SpawnedProcess.recorder:
        SpawnedProcess.recorder.of_parent = set(main.__dict__)


def seed_as_at_import(folder: Path) -> None:
    """Run the statements again with which the modules of a program, but not its main file, seed random numbers."""
    for module in [each for name, each in [*sys.modules.items()] if not name.endswith("__main__")]:
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or folder not in Path(file).parents:
            continue
        for each in ast.parse(Path(file).read_bytes()).body:
            called = each.value.func if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) else None
            if isinstance(called, ast.Attribute) and SEEDING.fullmatch(ast.unparse(called)):
                exec(compile(ast.Module([each], []), file, "exec"), vars(module))


def _begin(stored: io.BytesIO, entropy: int, number: int, parent_sentinel: int) -> int:
    """What a new interpreter does for the method "spawn"; returns its exit status."""
    own = SpawnedProcess
    devices.renew()  # pretended GPUs
    if own.evidence and torch.cuda._is_in_bad_fork():  # the parent has opened the real ones
        (own.evidence / NO_GPU).touch()
        os._exit(FAILED)
    renew_random_state(entropy)
    Salt.number = number
    current: Any = multiprocessing.process.current_process()
    current._inheriting = True
    when = " when the top level runs again"
    try:
        if own.recorder:
            seed_as_at_import(own.recorder.scratch)
        run_main_again()
        when = ""
        process = pickle.loads(stored.getvalue())
    except Exception as error:
        if own.recorder:
            note_exception(own.recorder, error, when)
        return 1
    finally:
        del current._inheriting
    status: int = process._bootstrap(parent_sentinel=parent_sentinel)
    return status
