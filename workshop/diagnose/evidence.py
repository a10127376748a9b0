"""What was seen of a program that hangs: its ranks, what each of them does, and its collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

# What a process does. "waits": it is in a collective. "joins": it is in init_process_group. "loads": it waits for a worker of
# its DataLoader. "ends": it waits for other processes in order to end. The others are what the kernel says of its main thread.
Kind = Literal[
    "waits", "joins", "loads", "ends", "lock", "sleep", "file", "network", "child", "computes", "stopped", "unknown"
]


@dataclass(frozen=True)
class Place:
    """A line of a program.

    Attributes:
        file: the path.
        line: from 1.
        function: the function of this line.
    """

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


@dataclass(frozen=True)
class Doing:
    """What the main thread of a process does.

    Attributes:
        kind: see ``Kind``.
        what: the collective ("all_reduce"), the file, or the function in which it is.
        place: the line of the program itself, not of a library; None: there is none on the stack.
        stack: the whole stack, innermost first.
    """

    kind: Kind = "unknown"
    what: str = ""
    place: Place | None = None
    stack: tuple[Place, ...] = ()

    def words(self) -> str:
        """Return what the process does, as the end of a sentence that begins with "it is"."""
        at = f" ({self.place})" if self.place else ""
        match self.kind:
            case "waits":
                return f"in {self.what}{at}"
            case "joins":
                return f"in init_process_group{at}, where it waits for the other ranks"
            case "loads":
                return f"in the DataLoader{at}, where it waits for a worker"
            case "ends":
                return f"at its end{at}, where it waits for other processes or threads"
            case "lock":
                return f"waiting for a lock{at}"
            case "sleep":
                return f"in a sleep{at}"
            case "file":
                return f"waiting for {self.what or 'a file'}{at}"
            case "network":
                return f"waiting for the network{at}"
            case "child":
                return f"waiting for a child process{at}"
            case "computes":
                return f"computing{at}"
            case "stopped":
                return f"stopped by a signal (SIGSTOP){at}"
            case _:
                return f"in {self.what or 'code that could not be read'}{at}"


@dataclass(frozen=True)
class Call:
    """One collective of one rank, as PyTorch's flight recorder noted it.

    Attributes:
        group: the name of the process group.
        number: the number of the collective in its group, from 1.
        name: such as "all_reduce".
        sizes: of the inputs.
        dtypes: of the inputs.
        complete: whether it has returned.
        place: the line that called it; None: autograd called it, in the backward pass.
        seconds: when it was called, in seconds since 1970.
        peer_to_peer: whether it is a send or a receive.
    """

    group: str
    number: int
    name: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    complete: bool = False
    place: Place | None = None
    seconds: float = 0
    peer_to_peer: bool = False

    def __str__(self) -> str:
        at = f" ({self.place})" if self.place else " (in the backward pass)"
        return f"{self.name} #{self.number}{at}"

    def shape(self) -> str:
        """Return the sizes and types of the inputs in words."""
        parts = [f"{list(size)} {dtype.lower()}" for size, dtype in zip(self.sizes, self.dtypes, strict=False)]
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class Process:
    """A process of a rank that is not its main process, such as a worker of a DataLoader.

    Attributes:
        pid: its process ID.
        doing: what its main thread does.
        worker: whether it is a worker of a DataLoader.
    """

    pid: int
    doing: Doing
    worker: bool = False


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank.

    Attributes:
        kind: the name of the exception's class.
        message: its message.
        traceback: the whole traceback.
        place: the line of the program that raised it.
        seconds: when, in seconds since 1970.
        stack: the frames of the traceback, innermost first.
    """

    kind: str
    message: str
    traceback: str = ""
    place: Place | None = None
    seconds: float = 0
    stack: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Rank:
    """One rank.

    Attributes:
        rank: its number; -1: unknown.
        pid: its process ID.
        node: the host on which it runs.
        alive: False: it has ended.
        doing: what its main thread does.
        before: what it did some seconds earlier; None: it was seen only once.
        busy: the share of one core that its processes used between the two.
        transferred: the bytes that they read and wrote between the two, in files and pipes.
        calls: its last collectives, in order; None: the flight recorder could not be asked.
        children: its other processes.
        failure: the exception that ended it.
        signal: the signal that ended it; 0: none.
        status: its exit status; None: unknown, or it is alive.
        settings: its variables for rendezvous and network, such as WORLD_SIZE, MASTER_ADDR and GLOO_SOCKET_IFNAME.
        world: the number of ranks, according to this one; 0: unknown.
        lost_workers: workers of its DataLoader that have ended.
    """

    rank: int
    pid: int = 0
    node: str = ""
    alive: bool = True
    doing: Doing = field(default_factory=Doing)
    before: Doing | None = None
    busy: float = 0
    transferred: int = 0
    calls: tuple[Call, ...] | None = None
    children: tuple[Process, ...] = ()
    failure: Failure | None = None
    signal: int = 0
    status: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    world: int = 0
    lost_workers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The rank in words."""
        return f"rank {self.rank}" if self.rank >= 0 else f"process {self.pid}"

    def pending(self) -> Call | None:
        """Return the collective in which the rank is; None: in none."""
        return next((call for call in reversed(self.calls or ()) if not call.complete), None)


@dataclass(frozen=True)
class Scene:
    """All that was seen of a program.

    Attributes:
        ranks: the ranks, in order.
        interfaces: the network interfaces of each node.
        missing: what could not be found out, one sentence each.
        log: the first error in the output of the program; "": none.
        killed_for_memory: process IDs that the kernel killed because memory ran out.
        seconds: how long the program has made no progress.
        here: the node on which this was seen; "": the ranks have ended, or run on several nodes.
    """

    ranks: tuple[Rank, ...]
    interfaces: dict[str, tuple[str, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    log: str = ""
    killed_for_memory: tuple[int, ...] = ()
    seconds: float = 0
    here: str = ""

    @property
    def alive(self) -> tuple[Rank, ...]:
        """The ranks that have not ended."""
        return tuple(rank for rank in self.ranks if rank.alive)


@dataclass(frozen=True)
class Diagnosis:
    """Why the program hangs.

    Attributes:
        cause: one word, such as "skipped" or "loader": see ``causes.py``.
        line: one sentence: which rank, which call, which line.
        why: why the other ranks wait, or why this matters.
        fix: what to do.
        place: the line of the cause, if known.
    """

    cause: str
    line: str
    why: str = ""
    fix: str = ""
    place: Place | None = None


def to_json(scene: Scene) -> dict[str, Any]:
    """Return a scene as dictionaries and lists that ``json`` can write."""
    return asdict(scene)


def from_json(data: dict[str, Any]) -> Scene:
    """Return the scene of ``to_json``.

    Raises:
        KeyError, TypeError, ValueError: these are not the data of a scene.
    """
    return Scene(
        tuple(_rank(rank) for rank in data["ranks"]),
        {node: tuple(names) for node, names in data.get("interfaces", {}).items()},
        tuple(data.get("missing", ())),
        data.get("log", ""),
        tuple(data.get("killed_for_memory", ())),
        data.get("seconds", 0),
        data.get("here", ""),
    )


def place(data: dict[str, Any] | None) -> Place | None:
    """Return the place of ``asdict``."""
    return None if data is None else Place(str(data["file"]), int(data["line"]), str(data.get("function", "")))


def call(data: dict[str, Any]) -> Call:
    """Return the collective of ``asdict``."""
    sizes = tuple(tuple(int(length) for length in size) for size in data.get("sizes", ()))
    return Call(**{**data, "sizes": sizes, "dtypes": tuple(data.get("dtypes", ())), "place": place(data.get("place"))})


def _doing(data: dict[str, Any]) -> Doing:
    return Doing(data["kind"], data.get("what", ""), place(data.get("place")), _stack(data))


def _stack(data: dict[str, Any]) -> tuple[Place, ...]:
    return tuple(frame for frame in map(place, data.get("stack", ())) if frame)


def _processes(data: Iterable[dict[str, Any]]) -> tuple[Process, ...]:
    return tuple(Process(each["pid"], _doing(each["doing"]), each.get("worker", False)) for each in data)


def _rank(data: dict[str, Any]) -> Rank:
    calls, before, failure = data.get("calls"), data.get("before"), data.get("failure")
    changes = {
        "doing": _doing(data["doing"]),
        "before": _doing(before) if before else None,
        "calls": None if calls is None else tuple(map(call, calls)),
        "children": _processes(data.get("children", ())),
        "failure": Failure(**{**failure, "place": place(failure.get("place")), "stack": _stack(failure)})
        if failure
        else None,
        "lost_workers": tuple(data.get("lost_workers", ())),
    }
    return Rank(**{**data, **changes})
