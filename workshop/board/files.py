"""Read what learners append to their files in the folder of the class: only new bytes, without locks, and never too much.

Nothing in a file is trusted. The identity of a learner is the file, and its owner where the file system knows one, so no line
changes anything about a different learner. Each look opens the files again, because a network file system shows new content
only then.
"""

import fnmatch
import os
import pwd
import stat
from collections import Counter
from pathlib import Path

from workshop.course.sharing import FILES, LONGEST_LINE

MOST_BYTES = 1 << 20  # of one file in one look; a learner writes less than a tenth of this on a day
MOST_FILES = 300
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LearnerFile:
    """A file of a learner.

    Attributes:
        owner: the account that owns it; "": unknown.
        changed: when it was last changed, in seconds since 1970.
        restarted: the last look found a different or a shorter file, and read it from its beginning.
        first: the last look was the first one.
        left_out: how often something was left out, by what it was.
        rest: the bytes of a last line that has no end yet.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.owner, self.changed = path, "", 0.0
        self.restarted = self.first = False
        self.left_out: Counter[str] = Counter()
        self.rest = b""
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._skips = False  # to the end of a line that is too long

    def read(self) -> list[bytes]:
        """Return the complete lines that were appended since the last look.

        Raises:
            OSError: the file cannot be read, or is not an ordinary file.
        """
        descriptor = os.open(self.path, FLAGS)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{self.path.name} is not an ordinary file")
            self._compare(status)
            missing = status.st_size - self._offset
            if not missing:
                return []
            if missing > MOST_BYTES:
                self.left_out[f"MB in the middle of a file (the board reads {MOST_BYTES >> 20} MB at a time)"] += (
                    missing - MOST_BYTES
                ) >> 20
                self._offset, self.rest, self._skips = status.st_size - MOST_BYTES, b"", True
            content = os.pread(descriptor, MOST_BYTES, self._offset)
        finally:
            os.close(descriptor)
        self._offset += len(content)
        return self._lines(content)

    def _compare(self, status: os.stat_result) -> None:
        """Notice whether this is the first look, and whether the file is a different one or was cut."""
        identity = (status.st_dev, status.st_ino)
        self.first = self._identity is None
        self.restarted = not self.first and (identity != self._identity or status.st_size < self._offset)
        if self.restarted:
            self._offset, self.rest, self._skips = 0, b"", False
            self.left_out.clear()
        if self.first or self.restarted:
            self.owner = _account(status.st_uid)
        self._identity, self.changed = identity, status.st_mtime

    def _lines(self, content: bytes) -> list[bytes]:
        if self._skips:
            _, end, content = content.partition(b"\n")
            if not end:
                return []
            self._skips = False
        *lines, self.rest = (self.rest + content).split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            self.rest, self._skips = b"", True
            self.left_out["lines that are too long"] += 1
        fitting = [line for line in lines if len(line) <= LONGEST_LINE]
        if len(fitting) < len(lines):
            self.left_out["lines that are too long"] += len(lines) - len(fitting)
        return [line for line in fitting if line]


def _account(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class Folder:
    """The files of a class, by their names.

    Attributes:
        problems: what could not be read in the last look, in sentences.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, LearnerFile] = {}
        self._found: set[str] = set()
        self.problems: list[str] = []

    def look(self) -> dict[str, list[bytes]]:
        """Return the new lines of each file that has some, and of each file that was found or restarted."""
        self.problems = []
        try:
            found = fnmatch.filter(os.listdir(self.path), FILES)
        except OSError as error:  # keep what is known
            self.problems.append(f"the folder {self.path} cannot be read ({error.strerror})")
            return {}
        self._choose(found)
        new = {}
        failed: Counter[str] = Counter()
        for name, file in list(self.files.items()):
            try:
                lines = file.read()
            except FileNotFoundError:
                del self.files[name]
                self._found = set()
                continue
            except OSError as error:
                failed[error.strerror or "not an ordinary file"] += 1
                continue
            if lines or file.first or file.restarted:
                new[name] = lines
        if len(found) > MOST_FILES:
            self.problems.append(f"the board shows {MOST_FILES} of {len(found)} files, equally many of each account")
        self.problems += [f"files that cannot be read ({why}): {number}" for why, number in sorted(failed.items())]
        return new

    def _choose(self, found: list[str]) -> None:
        """Keep at most ``MOST_FILES``, equally many of each account, so that no learner can displace the others."""
        if set(found) == self._found:
            return
        self._found, turns, turn = set(found), Counter[str](), {}
        for name in sorted(found, key=lambda each: (each not in self.files, each)):
            owner = _owner(self.path / name) if len(found) > MOST_FILES else ""
            turns[owner] += 1
            turn[name] = turns[owner]
        chosen = sorted(turn, key=turn.__getitem__)[:MOST_FILES]
        self.files = {name: self.files.get(name) or LearnerFile(self.path / name) for name in chosen}


def _owner(path: Path) -> str:
    try:
        return _account(path.lstat().st_uid)
    except OSError:
        return ""
