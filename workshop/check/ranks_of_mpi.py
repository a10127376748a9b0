"""mpi4py in the ranks of a program that mpirun starts.

The check starts the ranks itself, without MPI, so the real mpi4py would tell each process that it is alone. This module takes
its place. Its communicators exchange objects through the store of the launcher; the names are those of mpi4py
(https://mpi4py.readthedocs.io/en/stable/reference/mpi4py.MPI.html). It has what training programs use: ranks, and collectives
and messages of objects and arrays that return when they are done.
"""

import functools
import importlib
import operator
import pickle
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist

from workshop.errors import UserError

Operation = Callable[[Any, Any], Any]
IN_PLACE = object()  # an array that is both sent and received
FOREVER = timedelta(days=1)  # the check itself ends a run that waits
# The operations of mpi4py also combine lists, but by joining them, as Python does.
OPERATIONS: dict[str, Operation] = {
    "SUM": operator.add,
    "PROD": operator.mul,
    "MAX": lambda one, other: _numpy().maximum(one, other) if hasattr(one, "dtype") else max(one, other),
    "MIN": lambda one, other: _numpy().minimum(one, other) if hasattr(one, "dtype") else min(one, other),
    "LAND": lambda one, other: bool(one) and bool(other),
    "LOR": lambda one, other: bool(one) or bool(other),
}
IMPORT = re.compile(r"^\s*(?:from|import)\s+mpi4py\b", re.MULTILINE)
# Methods of the communicators of mpi4py that are missing here: messages of arrays, parts of arrays, calls that return at once.
MISSING = re.compile(
    r"\.(Send|Recv|Sendrecv|Gather|Scatter|Alltoall|Gatherv|Scatterv|Allgatherv|Alltoallv|Isend|Irecv|isend|irecv|sendrecv"
    r"|Ibcast|Iallreduce|Iallgather|Ibarrier|Probe|Iprobe|Spawn|Create_group)\("
)


class Communicator:
    """Some ranks, and what they send each other.

    Args:
        store: where the messages lie.
        members: the ranks of the program that belong to it, in the order of their ranks in it.
        me: the rank of this process in the program.
        name: tells its messages from those of other communicators; the same on all members.
    """

    def __init__(self, store: Any, members: Sequence[int], me: int, name: str):
        self._store, self._members, self._name = store, tuple(members), name
        self.rank, self.size = self._members.index(me), len(self._members)
        self._calls: Counter[str] = Counter()

    def Get_rank(self) -> int:
        """Return the number of this process."""
        return self.rank

    def Get_size(self) -> int:
        """Return the number of processes."""
        return self.size

    def _number(self, kind: str) -> str:
        self._calls[kind] += 1
        return f"mpi/{self._name}/{kind}/{self._calls[kind]}"

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))

    def _get(self, key: str) -> Any:
        return pickle.loads(self._store.get(key))

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Return the object of ``root``, which does not wait for the others."""
        key = self._number("call")
        if self.rank == root:
            self._put(key, obj)
            return obj
        return self._get(key)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank."""
        key = self._number("call")
        self._put(f"{key}/{self.rank}", sendobj)
        return [self._get(f"{key}/{rank}") for rank in range(self.size)]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on ``root``, and None on the others, which do not wait."""
        key = self._number("call")
        self._put(f"{key}/{self.rank}", sendobj)
        return [self._get(f"{key}/{rank}") for rank in range(self.size)] if self.rank == root else None

    def scatter(self, sendobj: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Return the object that ``root`` has for this rank."""
        return self.bcast(sendobj, root)[self.rank]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send one object to each rank; return those that the ranks have sent to this one."""
        return [each[self.rank] for each in self.allgather(list(sendobj))]

    def allreduce(self, sendobj: Any, op: Operation = operator.add) -> Any:
        """Return the objects of all ranks, combined."""
        return functools.reduce(op, self.allgather(sendobj))

    def reduce(self, sendobj: Any, op: Operation = operator.add, root: int = 0) -> Any:
        """Return the objects of all ranks, combined, on ``root``, and None on the others."""
        gathered = self.gather(sendobj, root)
        return None if gathered is None else functools.reduce(op, gathered)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.allgather(None)

    Barrier = barrier

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to a rank; do not wait until it is received."""
        self._put(self._number(f"{self.rank}-{dest}-{tag}"), obj)

    def recv(self, buf: Any = None, source: int = 0, tag: int = 0, status: Any = None) -> Any:
        """Wait for the next object from a rank, and return it."""
        return self._get(self._number(f"{source}-{self.rank}-{tag}"))

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Overwrite an array with that of ``root``."""
        array = _array(buf)
        array[...] = self.bcast(array, root)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Operation = operator.add) -> None:
        """Overwrite an array with the arrays of all ranks, combined."""
        result = _array(recvbuf)
        sent = result if sendbuf is IN_PLACE else _array(sendbuf)
        result[...] = _numpy().reshape(self.allreduce(sent, op), result.shape)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Operation = operator.add, root: int = 0) -> None:
        """Overwrite an array of ``root`` with the arrays of all ranks, combined."""
        combined = self.reduce(_array(recvbuf if sendbuf is IN_PLACE else sendbuf), op, root)
        if combined is not None:
            result = _array(recvbuf)
            result[...] = _numpy().reshape(combined, result.shape)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Overwrite an array with the arrays of all ranks, one after the other."""
        result = _array(recvbuf)
        result[...] = _numpy().reshape(_numpy().stack(self.allgather(_array(sendbuf))), result.shape)

    def Split(self, color: int = 0, key: int = 0) -> "Communicator":
        """Return the communicator of the ranks with the same color, in the order of their keys."""
        name = f"{self._name}.{self._calls['call'] + 1}.{color}"
        given = self.allgather((color, key))
        chosen = sorted((key, rank) for rank, (other, key) in enumerate(given) if other == color)
        members = [self._members[rank] for _, rank in chosen]
        return Communicator(self._store, members, self._members[self.rank], name)

    def Split_type(self, split_type: int = 0, key: int = 0) -> "Communicator":
        """Return the communicator of the ranks of this machine: all of them."""
        return self.Split(0, key)

    def Dup(self) -> "Communicator":
        """Return a communicator with the same ranks."""
        return self.Split(0, self.rank)

    def Abort(self, errorcode: int = 0) -> None:
        """End the program."""
        sys.exit(errorcode)


def _numpy() -> Any:
    """NumPy, which the check itself does without: only a program that sends arrays needs it."""
    return importlib.import_module("numpy")


def _array(buffer: Any) -> Any:
    """The array of a buffer, which may be a list of an array and its type or length."""
    return _numpy().asarray(buffer[0] if isinstance(buffer, list | tuple) else buffer)


def _mpi(world: Communicator, alone: Communicator) -> ModuleType:
    module = ModuleType("mpi4py.MPI")
    own: dict[str, Any] = {
        "COMM_WORLD": world, "COMM_SELF": alone, "Comm": Communicator, "Intracomm": Communicator, "IN_PLACE": IN_PLACE,
        "COMM_TYPE_SHARED": 0, "Wtime": time.perf_counter, "Get_processor_name": lambda: "localhost",
        "Is_initialized": lambda: True, "Is_finalized": lambda: False, "Init": lambda: None, "Finalize": lambda: None,
        "FLOAT": "f", "DOUBLE": "d", "INT": "i", "LONG": "l", "BYTE": "B", "BOOL": "?", "CHAR": "c",
    }  # fmt: skip
    vars(module).update(own | OPERATIONS)
    return module


def install(rank: int, size: int, port: int) -> None:
    """Let ``from mpi4py import MPI`` give this process its communicators.

    Args:
        rank: of this process.
        size: the number of processes.
        port: of the store of the launcher, on this machine.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=FOREVER)
    package = ModuleType("mpi4py")
    package.__path__ = []
    module = _mpi(Communicator(store, range(size), rank, "world"), Communicator(store, [rank], rank, f"self{rank}"))
    vars(package).update(MPI=module, rc=ModuleType("mpi4py.rc"), __version__="4.0.0")
    sys.modules |= {"mpi4py": package, "mpi4py.MPI": module, "mpi4py.rc": vars(package)["rc"]}


def require(text: str) -> None:
    """Look whether all that a program takes from MPI is here.

    Raises:
        UserError: something is missing.
    """
    here: Any = None
    known = vars(_mpi(here, here))
    missing = {f"MPI.{name}" for name in re.findall(r"\bMPI\.([A-Za-z]\w*)", text) if name not in known}
    missing |= {f"{name}()" for name in MISSING.findall(text)}
    if IMPORT.search(text) and missing:
        lacks = ", ".join(sorted(missing))
        raise UserError(
            f"the check starts the ranks without MPI, with a stand-in for mpi4py that lacks what the program uses: {lacks}"
        )
