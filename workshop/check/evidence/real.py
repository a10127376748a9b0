"""What a real launcher shows: fresh interpreters, restarts after kill -9, Slurm's variables, and the speed by itself."""

from dataclasses import dataclass


class _Printed:
    """A run of which the check has kept what it printed."""

    text: str

    @property
    def error(self) -> str:
        """The last error that was printed."""
        return last_error(self.text)

    @property
    def end(self) -> str:
        """The end of what was printed, for ``--verbose``."""
        return self.text[-3000:]


@dataclass(frozen=True)
class RealRun(_Printed):
    """A program that was started for real, in one process or in several."""

    statuses: tuple[int | None, ...]  # of each process that the check started; None: it ran over its time
    text: str  # what all of them printed
    limit: float  # the time that they had, in seconds
    processes: tuple[int, ...]  # how many processes trained, for each epoch in the log
    checkpoint: bool  # whether there is a checkpoint at the end


@dataclass(frozen=True)
class Killed(_Printed):
    """A run under torchrun in which one process was killed with kill -9 after the first epoch."""

    reached: bool  # whether it reached the end of the first epoch
    workers: int  # how many processes torchrun had started then
    text: str  # what it printed
    orphans: int = 0  # how many of the workers still ran five seconds after torchrun had been killed
    status: int | None = None  # of the run, or of the next start where torchrun was killed; None: it ran over its time
    # The largest difference between a tensor of its checkpoint and of an uninterrupted run's; infinity: they hold different
    # tensors; None: there is no checkpoint, or the status is not 0.
    difference: float | None = None


@dataclass(frozen=True)
class Kills:
    """What kill -9 does to a run under torchrun."""

    uninterrupted: int | None  # the exit status of the run without a kill; where it is not 0, nothing was killed
    worker: Killed | None = None  # where one worker was killed
    torchrun: Killed | None = None  # where torchrun was killed, and started again


@dataclass(frozen=True)
class Speeds:
    """How fast a program and the solution of its exercise are, started in turns."""

    own: tuple[float, ...]  # samples per second in the best epoch of each turn; empty: it wrote no log
    solution: tuple[float, ...]  # the same
    failed: str = ""  # what was printed by the first of them that ended with an error; "" where none did


def last_error(text: str) -> str:
    """The last error in what a program printed, or its last line."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line or "error:" in line]
    own = [line for line in lines if "ChildFailed" not in line]  # which is torchrun's
    return (own or text.strip().splitlines() or ["no output"])[-1][:300]
