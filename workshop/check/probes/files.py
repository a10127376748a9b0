"""Files: what the program writes, renames, saves and loads; and that it writes nowhere but in the run's folder."""

import fcntl
import os
import sys
import threading
from typing import Any

import torch

from workshop.check.evidence.events import FileRenamed, FileWritten, Loaded, Saved, WroteOutside
from workshop.check.probes.patching import Function
from workshop.check.probes.probe import Probe
from workshop.check.probes.recorder import Recorder

# Changes without content: one process may clear away what the others have written.
ENTRIES = frozenset(("os.remove", "os.mkdir", "os.rmdir"))
EVENTS = ENTRIES | {"open", "os.rename", "os.truncate"}
OUTSIDE = "workshop check: writing outside of the run's folder is not allowed"


class Files(Probe):
    """Notes files by Python's audit events, and by ``torch.save``, which opens its file in C++."""

    writes = (FileWritten, FileRenamed, Saved, Loaded, WroteOutside)
    always = True

    def __init__(self, recorder: Recorder):
        super().__init__(recorder)
        self.installed = False
        scratch = os.path.realpath(recorder.scratch)
        self.scratch = scratch + os.sep
        self.caches = os.path.join(scratch, "tmp") + os.sep
        self.allowed = tuple(os.path.realpath(place) + os.sep for place in (scratch, recorder.folder, "/dev", "/proc"))

    def install(self) -> None:
        """Listen to audit events, and replace ``torch.save`` and ``torch.load``."""
        self.installed = True
        sys.addaudithook(self._audit)
        self.patches.wrap(torch, "save", self._save)
        self.patches.wrap(torch, "load", self._load)

    def undo(self) -> None:
        """Put everything back; an audit hook cannot be removed, so it does nothing from now on."""
        self.installed = False
        super().undo()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS or not self.installed:
            return
        path = ""
        with self.recorder.guard:
            path = self._changed(event, arguments)
        if path and event in ENTRIES:
            self._stay_inside(path)
        elif path:
            self._write(path)

    def _changed(self, event: str, arguments: tuple[Any, ...]) -> str:
        """The path of the file that is changed; "" if none is."""
        if event in ENTRIES:
            return _entry(arguments[0], arguments[-1])
        if event == "os.rename":
            source, target = (_entry(*given) for given in zip(arguments[:2], arguments[2:], strict=True))
            self.recorder.note(FileRenamed(source=source, where=self.recorder.where()))
            return target
        path = arguments[0]
        if not isinstance(path, (str, bytes, os.PathLike)) or (event == "open" and not _is_writing(*arguments[1:])):
            return ""
        return os.path.realpath(os.fsdecode(path))

    def _stay_inside(self, path: str) -> None:
        """Let the program write here only if it may; the error reaches the program, as a write-protected folder's would."""
        if not (path + os.sep).startswith(self.allowed):
            self.recorder.note(WroteOutside(path=path, where=self.recorder.where()))
            raise PermissionError(13, OUTSIDE, path)

    def _write(self, path: str) -> None:
        """Note that a file of the run gets content; files in caches, and those that a library leaves, are not the run's."""
        self._stay_inside(path)
        if path.startswith(self.scratch) and not path.startswith(self.caches) and not self.recorder.starting:
            self.recorder.note(FileWritten(path=path, where=self.recorder.where()))

    def _save(self, original: Function) -> Function:
        recorder = self.recorder

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return original(obj, f, *args, **kwargs)  # DCP's, which saves while the program continues to train
            if isinstance(f, (str, os.PathLike)):
                self._write(os.path.realpath(os.fspath(f)))
            recorder.saved = True
            with recorder.guard:
                recorder.note(Saved(path=_path(f), keys=_state_keys(obj), where=recorder.where()))
            recorder.quiet += 1
            try:
                return original(obj, f, *args, **kwargs)
            finally:
                recorder.quiet -= 1

        return save

    def _load(self, original: Function) -> Function:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.guard:
                self.recorder.note(Loaded(where=self.recorder.where()))
            return original(f, *args, **kwargs)

        return load


def _is_writing(mode: str | None, flags: int | None) -> bool:
    if flags is not None:
        return bool(flags & (os.O_WRONLY | os.O_RDWR))
    return any(letter in (mode or "") for letter in "wax+")


def _entry(name: Any, descriptor: int) -> str:
    """The whole path of an entry of a folder, which can be given by its descriptor: ``shutil.rmtree`` does so."""
    folder, name = os.path.split(os.fsdecode(name).rstrip(os.sep))
    if descriptor >= 0:
        folder = os.path.join(_folder(descriptor), folder)
    return os.path.join(os.path.realpath(folder), name)  # the entry itself, even if it is a link


def _folder(descriptor: int) -> str:
    if sys.platform == "darwin":
        return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _path(file: Any) -> str:
    """The path of a file that ``torch.save`` is given as a path or as an open file; "" if it has none."""
    path = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "")
    return os.path.realpath(os.fspath(path)) if isinstance(path, (str, os.PathLike)) and path else ""


def _state_keys(obj: Any) -> list[str]:
    """The names of the model's parameters in what is saved: those of the dict with the most tensors."""
    best: list[str] = []
    if isinstance(obj, dict):
        own = [str(key) for key, value in obj.items() if isinstance(value, torch.Tensor)]
        best = max([own, *(_state_keys(value) for value in obj.values())], key=len)
    return best
