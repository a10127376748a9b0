"""Share checks and hints with the board of the class: one line of JSON per event, in a file of the learner in a shared folder.

A learner shares nothing before ``workshop board join NAME``. The lines contain no text of programs, no output and no paths::

    {"at": 1795700000.0, "event": "join", "name": "Ada"}
    {"at": 1795700010.0, "event": "start", "stage": "02_pytorch_ddp"}
    {"at": ..., "event": "check", "exercise": "02_pytorch_ddp/exercise1_multigpu.py", "goals": {"1": true, "2": false},
     "rule": "device-shared", "seconds": 5.6}
    {"at": ..., "event": "hint", "exercise": "02_pytorch_ddp/exercise1_multigpu.py", "goal": 2, "number": 1}

``at`` is the clock of the learner's machine, in seconds since 1970.
"""

import fcntl
import json
import os
import secrets
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import ROOT

SETTINGS = ROOT / "ondemand" / "settings.yml"
FILES = "learner-*.jsonl"
LONGEST_NAME = 30  # characters
LONGEST_LINE = 4096  # bytes; a line is appended with one write, which the kernel does not mix with a different one
MODE = 0o640  # the group of the folder reads; nobody but the learner writes
PATIENCE = 2.0  # seconds that a check waits for a file system that does not answer


@dataclass(frozen=True)
class Membership:
    """What a learner has agreed to share with.

    Attributes:
        folder: the folder of the class.
        file: the name of the learner's file in it.
        name: the name or nickname that the board shows.
    """

    folder: str
    file: str
    name: str

    @property
    def path(self) -> Path:
        """The path of the learner's file."""
        return Path(self.folder) / self.file


def class_folder() -> Path | None:
    """Return the folder of the class: ``$WORKSHOP_CLASS``, or ``class:`` in ondemand/settings.yml; None: there is none."""
    name = os.environ.get("WORKSHOP_CLASS", "")
    if not name:
        try:
            import yaml

            name = yaml.safe_load(SETTINGS.read_text()).get("class") or ""
        except Exception:  # the file is missing or damaged, or pyyaml is not installed
            return None
    return Path(os.path.expandvars(str(name))).expanduser() if name else None


def require_class_folder() -> Path:
    """Return the folder of the class.

    Raises:
        UserError: no folder is set, or it does not exist.
    """
    folder = class_folder()
    if folder is None:
        raise UserError(
            "no folder of a class is set: set WORKSHOP_CLASS=/shared/course, or class: in ondemand/settings.yml "
            "(INSTRUCTORS.md, 'See who is stuck')"
        )
    if not folder.is_dir():
        raise UserError(f"the folder of the class, {folder}, does not exist or is not a folder: ask your instructor")
    return folder.absolute()


def clean_name(text: object) -> str:
    """Return a name without control characters, with single spaces and at most 30 characters."""
    printable = "".join(letter if letter.isprintable() else " " for letter in str(text)[:1000])
    return " ".join(printable.split())[:LONGEST_NAME].strip()


def membership(record: Path) -> Membership | None:
    """Return what the file ``record`` says, which ``join`` has written; None: the learner shares nothing."""
    try:
        return Membership(**json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):  # it does not exist, or is damaged
        return None


def join(name: str, record: Path) -> Membership:
    """Begin to share with the class, under a name, and write this to the file ``record``.

    A learner who has joined this class before keeps the file, and the board shows the new name.

    Raises:
        UserError: the name is empty, no folder of a class is set, or it is not writable.
    """
    folder, name = require_class_folder(), clean_name(name)
    if not name:
        raise UserError("the name for the board is empty; choose a name or a nickname with letters")
    before = membership(record)
    file = before.file if before and before.folder == str(folder) else f"learner-{secrets.token_hex(8)}.jsonl"
    member = Membership(str(folder), file, name)
    try:
        _append(member, {"event": "join", "name": name})
        record.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(record, json.dumps(asdict(member)) + "\n")
    except OSError as error:
        raise UserError(f"cannot join the board of the class ({error.strerror}: {error.filename or folder})") from error
    return member


def leave(record: Path) -> Membership | None:
    """Stop sharing, delete what was shared, and return what it was; None: the learner shared nothing.

    Raises:
        UserError: a file cannot be deleted.
    """
    member = membership(record)
    try:
        if member:
            member.path.unlink(missing_ok=True)
        record.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot delete {error.filename} ({error.strerror})") from error
    return member


def share(record: Path, **event: object) -> None:
    """Append an event to the learner's file, if the learner has joined.

    It never raises an error and never waits longer than ``PATIENCE``. If the event cannot be written, one sentence on standard
    error says so.
    """
    member = membership(record)
    if member is None:
        return
    problem: list[str] = []

    def write() -> None:
        try:
            _append(member, event)
        except OSError as error:
            problem.append(error.strerror or str(error))

    # A thread, because a network file system that does not answer blocks the call; the process can end meanwhile.
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        problem.append("the file system does not answer")
    if problem:
        print(
            f"workshop: the board of the class in {member.folder} did not get this ({problem[0]}); everything else works",
            file=sys.stderr,
        )


def _append(member: Membership, event: dict[str, object]) -> None:
    """Append one line with one write. A new file begins with the name of the learner."""
    events = [event]
    descriptor = os.open(member.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
    try:
        # A line that crosses a page of the file appears in two parts. Without the lock, a different process takes the first part
        # for a line that was cut off, and adds an empty line. Some network file systems have no locks.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        before = b""
        if size == 0:
            os.fchmod(descriptor, MODE)  # the umask may have removed the right of the group
            events = [event] if event["event"] == "join" else [{"event": "join", "name": member.name}, event]
        elif os.pread(descriptor, 1, size - 1) != b"\n":
            before = b"\n"  # the disk was full in the middle of a line
        lines = [json.dumps({"at": round(time.time(), 3), **each}).encode() for each in events]
        content = before + b"\n".join(lines) + b"\n"
        if os.write(descriptor, content) != len(content):
            raise OSError(28, "the disk is full", member.path)
    finally:
        os.close(descriptor)  # with NFS, this may report that the disk is full
