"""Read PyTorch's flight recorder: from a process that answers (``boot/sitecustomize.py``), or from a file."""

from __future__ import annotations

import io
import json
import pickle
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop.diagnose.evidence import Call, Failure, Place
from workshop.diagnose.programs import own_place

VERSIONS = ("2.",)  # the format of the recorder: major version


@dataclass(frozen=True)
class Answer:
    """What a process says of itself.

    Attributes:
        rank: its rank; -1: unknown.
        world: the number of ranks; 0: unknown.
        joined: whether init_process_group has returned.
        torch: the version of PyTorch; "": torch is not imported.
        calls: its last collectives; None: its PyTorch has no flight recorder.
    """

    rank: int
    world: int
    joined: bool
    torch: str
    calls: tuple[Call, ...] | None


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries only: a pickle file may otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is no plain value")


def progress(folder: Path, pid: int, timeout: float = 1) -> object:
    """Return something that changes when the process calls a collective or one completes; None: it does not answer."""
    reply = _ask(folder, pid, b"p", timeout)
    return None if reply is None else reply.partition(b"\n")[2]


def ask(folder: Path, pid: int, timeout: float = 6) -> Answer | None:
    """Ask a process for its collectives.

    Args:
        folder: the folder of ``workshop diagnose``, which contains the socket of the process.
        pid: its process ID.
        timeout: seconds to wait: a process that holds Python's lock does not answer.

    Returns:
        the answer, or None if the process does not answer.
    """
    reply = _ask(folder, pid, b"a", timeout)
    if reply is None:
        return None
    about, _, trace = reply.partition(b"\n")
    try:
        data = json.loads(about)
        calls = read(trace) if trace else None
        return Answer(int(data["rank"]), int(data["world"]), bool(data["joined"]), str(data["torch"]), calls)
    except (ValueError, KeyError, TypeError):
        return None


def _ask(folder: Path, pid: int, question: bytes, timeout: float) -> bytes | None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(folder / f"{pid}.socket"))
            connection.sendall(question)
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
            return b"".join(parts) or None
    except OSError:
        return None


def read(trace: bytes) -> tuple[Call, ...]:
    """Return the collectives in a dump of the flight recorder, in the order of the calls.

    Args:
        trace: the dump as pickle or as JSON.

    Raises:
        ValueError: it is cut short, of a different version, or no dump.
    """
    try:
        data = json.loads(trace) if trace[:1] == b"{" else _Plain(io.BytesIO(trace)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"it is not a complete dump of the flight recorder ({error or type(error).__name__})"
        ) from None
    if not isinstance(data, dict) or "version" not in data:
        raise ValueError("it is no dump of the flight recorder")
    if not str(data["version"]).startswith(VERSIONS):
        raise ValueError(f"its version is {data['version']}, but this program reads only versions 2.x")
    try:
        return tuple(_call(entry) for entry in data.get("entries", ()))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"an entry of the flight recorder cannot be read ({error!r})") from None


def _call(entry: dict[str, Any]) -> Call:
    frames = [Place(str(f["filename"]), int(f["line"]), str(f["name"])) for f in entry.get("frames", ())]
    peer_to_peer = bool(entry.get("is_p2p"))
    group = entry["process_group"]
    sizes = [tuple(int(length) for length in size) for size in entry.get("input_sizes", ())]
    dtypes = entry.get("input_dtypes", ())
    return Call(
        group=str(group[1] if len(group) > 1 and group[1] not in ("", "undefined") else group[0]),
        number=int(entry["p2p_seq_id"] if peer_to_peer else entry["collective_seq_id"]),
        name=str(entry["profiling_name"]).split(":")[-1],
        sizes=tuple(sizes),
        dtypes=tuple(map(str, dtypes if isinstance(dtypes, list | tuple) else [dtypes])),
        complete=bool(entry.get("retired")) or entry.get("state") == "completed",
        place=own_place(frames),
        seconds=entry.get("time_created_ns", 0) / 1e9,
        peer_to_peer=peer_to_peer,
    )


def failure(folder: Path, pid: int) -> Failure | None:
    """Return the exception that ended a process, as ``boot/sitecustomize.py`` noted it; None: none is known."""
    try:
        data = json.loads((folder / f"{pid}.failure").read_text())
        frames = tuple(Place(file, int(line), name) for file, line, name in reversed(data["frames"]))
        return Failure(data["kind"], data["message"], data["traceback"], own_place(frames), data["seconds"], frames)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def rank_of(note: Path) -> int:
    """Return the rank of a process of which ``boot/sitecustomize.py`` noted an exception or its end; -1: unknown."""
    try:
        return int(json.loads(note.read_text())["rank"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def last_stack(folder: Path, pid: int) -> tuple[Place, ...]:
    """Return the stack of the main thread of a process that has aborted or was told to end (SIGTERM); empty: unknown."""
    try:
        text = (folder / f"{pid}.fault").read_text(errors="replace")
    except OSError:
        return ()
    # Python writes the main thread last.
    found = re.findall(
        r'  File "(.*)", line (\d+) in (.*)', re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.M)[-1]
    )
    return tuple(Place(file, int(line), function) for file, line, function in found)
