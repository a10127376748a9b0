"""Evidence of real launchers: new interpreters, restarts after kill -9, variables of Slurm, and the speed without the check."""

from dataclasses import dataclass


class _Printed:
    """A run with its printed output."""

    text: str

    @property
    def error(self) -> str:
        """The last error that was printed."""
        return last_error(self.text)

    @property
    def end(self) -> str:
        """The end of the output, for ``--verbose``."""
        return self.text[-3000:]


@dataclass(frozen=True)
class RealRun(_Printed):
    """A program that was started without probes, in one or several processes."""

    statuses: tuple[int | None, ...]  # of each process that the check started; None: it exceeded the time limit
    text: str  # what all processes printed
    limit: float  # their time limit, in seconds
    processes: tuple[int, ...]  # number of processes in each epoch of the log
    checkpoint: bool  # whether there is a checkpoint at the end
    losses: tuple[float, ...] = ()  # of each step of the first epoch in the log
    expected: tuple[float, ...] = ()  # those of the solution
    launcher: str = "mp.spawn"


@dataclass(frozen=True)
class Killed(_Printed):
    """A run under torchrun in which one process was killed with kill -9 after the first epoch."""

    reached: bool  # whether it reached the end of the first epoch
    workers: int  # number of processes that torchrun had started then
    text: str  # what it printed
    shared_store: bool = False  # torchrun shares its store with the workers
    orphans: int = 0  # number of workers that still ran five seconds after torchrun was killed
    status: int | None = None  # of the run or, if torchrun was killed, of the next start; None: time limit exceeded
    # The largest difference to the checkpoint of an uninterrupted run; infinity: other tensors; None: no checkpoint, or failed.
    difference: float | None = None


@dataclass(frozen=True)
class Kills:
    """What kill -9 does to a run under torchrun."""

    uninterrupted: int | None  # the exit status of the run without a kill; if it is not 0, nothing was killed
    worker: Killed | None = None  # after a worker was killed
    torchrun: Killed | None = None  # after torchrun was killed and started again


@dataclass(frozen=True)
class Speeds:
    """The throughput of a program and of the solution of its exercise, started alternately."""

    own: tuple[float, ...]  # samples per second in the best epoch of each start; empty: it wrote no log
    solution: tuple[float, ...]  # the same for the solution
    failed: str = ""  # the output of the first start that ended with an error; "" if none did


def last_error(text: str) -> str:
    """Return the last error in the output of a program, or its last line."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line or "error:" in line]
    own = [line for line in lines if "ChildFailed" not in line]  # an error of torchrun itself
    return (own or text.strip().splitlines() or ["no output"])[-1][:300]
