"""Files: what the program writes, renames, saves and loads; it may write only in the folder of the run."""

import fcntl
import itertools
import linecache
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from workshop.check.evidence.events import FileRenamed, FileWritten, Loaded, Saved, WroteOutside
from workshop.check.evidence.misuses import PythonStarted, SavedEmpty
from workshop.check.folder import extensions, make_own, top_of
from workshop.check.probes.contents import sketches
from workshop.check.probes.probe import Function, Probe, around, before
from workshop.check.probes.recorder import Recorder
from workshop.tensors import own_part

# Changes without contents: one process may remove files of the others.
ENTRIES = frozenset(("os.remove", "os.mkdir", "os.rmdir"))
EVENTS = ENTRIES | {"open", "os.rename", "os.truncate"}
LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib")})
DEPTH, TENSORS = 6, 2000  # of a saved object that is recorded
EMPTIES = re.compile(r"\s*with\s+open\(.*\).*:.*\n\s+pass\b")
OUTSIDE = "workshop check: writing outside of the run's folder is not allowed"


PYTHON = re.compile(r"(?:^|[\s/;&|])(?:python[\d.]*|torchrun|accelerate|deepspeed)(?:\s|$)")
SHELLS = ("sh", "bash", "dash", "zsh")


def _command(event: str, arguments: tuple[Any, ...]) -> str:
    """The command that a program starts: that of a shell, or the path of a program."""
    if event == "os.system":
        return os.fsdecode(arguments[0])
    program = os.path.basename(os.fsdecode(arguments[0]))
    given = arguments[1]
    if program not in SHELLS:
        return program
    return given if isinstance(given, str) else " ".join(os.fsdecode(each) for each in given)


class Files(Probe):
    """Records files through audit events of Python, and ``torch.save``, which opens its file in C++."""

    writes = (FileWritten, FileRenamed, Saved, Loaded, WroteOutside, PythonStarted, SavedEmpty)

    copying = False  # this probe itself changes files

    def __init__(self, recorder: Recorder):
        super().__init__(recorder)
        # The folders around the copy of a program belong to the check too: many programs write to ../output.
        base = top_of(recorder.scratch, recorder.original) if recorder.original else recorder.scratch
        own = recorder.scratch / "tmp"
        places = (base, own, recorder.folder, "/dev", "/proc", extensions())
        self.allowed = tuple(os.path.realpath(place) + os.sep for place in places)
        self.base, self.caches, self.evidence = self.allowed[:3]
        self.began = time.time()

    def install(self) -> None:
        super().install()
        sys.addaudithook(self._audit)  # a hook cannot be removed

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.system") and self.installed:
            with self.recorder.guard:
                if PYTHON.search(_command(event, arguments)):
                    self.note_here(PythonStarted())
        elif event in EVENTS and self.installed and not self.copying:
            path = ""
            with self.recorder.guard:
                path = self._changed(event, arguments)
            if path:
                kept = event in ENTRIES or (event == "open" and _keeps(arguments[2]))
                self._write(path, content=not kept and not self._empties())

    def _empties(self) -> bool:
        """Whether the line of the program opens a file only to empty it."""
        with self.recorder.guard:
            frame = next(self.recorder.frames(), None)
            file, number = (frame.f_code.co_filename, frame.f_lineno) if frame else ("", 0)
            return EMPTIES.match(linecache.getline(file, number) + linecache.getline(file, number + 1)) is not None
        return False

    def _changed(self, event: str, arguments: tuple[Any, ...]) -> str:
        """Return the path of the changed file, or "" if there is none."""
        if self.recorder.original and isinstance(arguments[0], (str, bytes, os.PathLike)):
            self._make_own(os.fsdecode(arguments[0]), event, arguments)
        if event == "os.mkdir" and isinstance(arguments[0], (str, bytes, os.PathLike)) and os.path.isdir(arguments[0]):
            return (
                ""  # os.makedirs(exist_ok=True) also tries to make folders that exist, such as that for temporary files
            )
        if event in ENTRIES:
            return _entry(arguments[0], arguments[-1])
        if event == "os.rename":
            source, target = _entry(arguments[0], arguments[2]), _entry(arguments[1], arguments[3])
            self.note_here(FileRenamed(source=source))
            return target
        path = arguments[0]
        reading = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if reading and not self.recorder.received and isinstance(path, (str, bytes, os.PathLike)):
            self.recorder.received = self._of_this_run(os.path.realpath(os.fsdecode(path)))
        # Python opens a temporary file with the path of its folder, and then with its own.
        ignored = reading or not isinstance(path, (str, bytes, os.PathLike)) or os.path.isdir(path)
        return "" if ignored else os.path.realpath(os.fsdecode(path))

    def _of_this_run(self, path: str) -> bool:
        """Whether a process has written a file in the folder of the run since this process began."""
        with suppress(OSError):
            own = path.startswith(self.base) and not path.startswith((self.caches, self.evidence))
            return own and os.stat(path).st_mtime > self.began
        return False

    def _make_own(self, path: str, event: str, arguments: tuple[Any, ...]) -> None:
        """Replace links to the original in the path of a file or entry that is about to change."""
        writing = event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not writing:
            return
        self.copying = True
        try:
            for name in [path, os.fsdecode(arguments[1])] if event == "os.rename" else [path]:
                place = os.path.abspath(name)
                whole = event in ("open", "os.truncate")
                make_own(place if whole else os.path.dirname(place), self.base, f"{self.caches}links.lock")
        finally:
            self.copying = False

    def _write(self, path: str, content: bool = True) -> None:
        """Allow the write only in permitted folders; otherwise raise the error of a write-protected folder."""
        if not (path + os.sep).startswith(self.allowed):
            # A library that finds its own folder write-protected does without the cache that it wanted to write there.
            if not f"{path}{os.sep}".startswith(LIBRARIES) and "/__pycache__" not in path:
                self.note_here(WroteOutside(path=path))
            raise PermissionError(13, OUTSIDE, path)
        # Ignore files in caches, and those that a library writes at its start.
        of_run = path.startswith(self.base) and not path.startswith((self.caches, self.evidence))
        if content and of_run and not self.recorder.starting:
            self.note_here(FileWritten(path=path))

    @around(torch, "save")
    def _save(self, original: Function, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return original(obj, f, *args, **kwargs)  # a thread of DCP, which saves while training continues
        if isinstance(f, (str, os.PathLike)):
            with self.recorder.guard:
                self._changed("open", (f, "w", os.O_WRONLY))
            self._write(os.path.realpath(os.fspath(f)))
        self.recorder.saved += 1
        with self.recorder.guard:
            self.note_here(self._saved(obj, _path(f)))
            partitioned = self.recorder.sharded or "deepspeed" in sys.modules
            # (An engine saves its parts in other files.)
            if partitioned and self.recorder.own(sys._getframe(2).f_code.co_filename):
                self._note_empty(obj, _path(f))
        with self.recorder.quietly():
            return original(obj, f, *args, **kwargs)

    def _note_empty(self, obj: Any, path: str) -> None:
        """Note whether parameters of a model have no values in an object that is saved."""
        known = {name.removeprefix("module.") for name in self.recorder.names.values()}
        sizes = {name: size for name, size in _sizes(obj).items() if name.removeprefix("module.") in known}
        if empty := [name for name, size in sizes.items() if size == 0]:
            self.note_here(SavedEmpty(path=path, names=empty, of=len(sizes)))

    def _saved(self, obj: Any, path: str) -> Saved:
        own = sum(elements(optimizer.state) for optimizer in self.recorder.optimizers)
        tensors = list(itertools.islice(tensors_in(obj), TENSORS))
        known = self.recorder.copies
        copies = {known.get(each.data_ptr(), "") for each in tensors if known and type(each) is torch.Tensor}
        return Saved(
            path=path,
            keys=_state_keys(obj),
            moments=moments(obj),
            own=own,
            tensors=sketches(each for each in tensors if each.is_floating_point()),
            copies=sorted(copies - {""}),
        )

    @before(torch, "load")
    def _load(self, f: Any = "", *args: Any, **kwargs: Any) -> None:
        self.note_here(Loaded(path=_path(f)))


def tensors_in(value: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in an object that is saved."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each, depth - 1)


def moments(value: Any, depth: int = 3) -> int:
    """The number of elements of the optimizer states in an object that is saved."""
    if not isinstance(value, dict) or depth == 0:
        return 0
    if {"state", "param_groups"} <= value.keys() and isinstance(value["state"], dict):
        return elements(value["state"])
    return sum(moments(each, depth - 1) for each in value.values())


def elements(state: Any) -> int:
    """The number of elements of the tensors of an optimizer state, without its counters."""
    states = (values for values in state.values() if isinstance(values, dict))  # None: another rank has it (ZeRO)
    tensors = (own_part(each) for values in states for each in values.values() if isinstance(each, torch.Tensor))
    return sum(each.numel() for each in tensors if each.dim() > 0)


def _keeps(flags: int) -> bool:
    """Whether a file that is opened with these flags keeps its content: a log, or an array that may only be read."""
    updates = flags & os.O_RDWR and not flags & (os.O_CREAT | os.O_TRUNC)  # np.memmap(path), with its usual mode "r+"
    return bool(flags & os.O_APPEND or updates)


def _entry(name: Any, descriptor: int) -> str:
    """Return the full path of an entry of a folder; the folder can be a descriptor, as in ``shutil.rmtree``."""
    folder, name = os.path.split(os.fsdecode(name).rstrip(os.sep))
    if descriptor >= 0 and sys.platform == "darwin":
        folder = os.path.join(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")), folder)
    elif descriptor >= 0:
        folder = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), folder)
    return os.path.join(os.path.realpath(folder), name)  # not resolved, because the entry can be a link


def _path(file: Any) -> str:
    """Return the path of a file for ``torch.save``, a path or an open file; "" if it has none."""
    path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "")
    return os.path.realpath(os.fspath(path)) if isinstance(path, (str, os.PathLike)) and path else ""


def _sizes(obj: Any, depth: int = DEPTH) -> dict[str, int]:
    """The number of elements of each tensor in a saved object, by its key; without those of which each rank saves a part."""
    found: dict[str, int] = {}
    if isinstance(obj, dict) and depth:
        for key, value in obj.items():
            if not isinstance(value, torch.Tensor):
                found |= _sizes(value, depth - 1)
            elif not hasattr(value, "local_shards"):  # a ShardedTensor of FSDP1 does not tell the number
                found[str(key)] = value.numel()
    return found


def _state_keys(obj: Any) -> list[str]:
    """Return the names of the model parameters in a saved object: the keys of the dict with the most tensors."""
    if not isinstance(obj, dict):
        return []
    own = [str(key) for key, value in obj.items() if isinstance(value, torch.Tensor)]
    return max([own, *(_state_keys(value) for value in obj.values())], key=len)
