"""What a real launcher shows: fresh interpreters, restarts after kill -9, Slurm's variables, and the speed by itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RealRun:
    """A program that was started for real, in one process or in several.

    Attributes:
        statuses: the exit status of each process that the check started; None: it still ran when the time was over.
        text: what all of them printed.
        limit: the time that they had, in seconds.
        processes: how many processes trained, for each epoch in the log.
        checkpoint: whether there is a checkpoint at the end.
    """

    statuses: tuple[int | None, ...]
    text: str
    limit: float
    processes: tuple[int, ...]
    checkpoint: bool

    @property
    def error(self) -> str:
        """The last error that was printed."""
        return last_error(self.text)


@dataclass(frozen=True)
class Killed:
    """A run under torchrun in which one process was killed with kill -9 after the first epoch.

    Attributes:
        reached: whether it reached the end of the first epoch.
        workers: how many processes torchrun had started then.
        orphans: how many of them still ran five seconds after torchrun had been killed.
        status: the exit status of the run, or of the next start where torchrun itself was killed; None: it still ran when the
            time was over.
        text: what it printed.
        difference: the largest difference between a tensor of its checkpoint and of an uninterrupted run's; infinity: they hold
            different tensors; None: there is no checkpoint, or the status is not 0.
    """

    reached: bool
    workers: int
    text: str
    orphans: int = 0
    status: int | None = None
    difference: float | None = None

    @property
    def error(self) -> str:
        """The last error that was printed."""
        return last_error(self.text)

    @property
    def begun(self) -> bool:
        """Whether there was a process to kill: two processes of torchrun had trained for an epoch."""
        return self.reached and self.workers == 2


@dataclass(frozen=True)
class Kills:
    """What kill -9 does to a run under torchrun.

    Attributes:
        uninterrupted: the exit status of the run without a kill; where it is not 0, nothing was killed.
        worker: where one worker was killed.
        torchrun: where torchrun was killed, and started again.
    """

    uninterrupted: int | None
    worker: Killed | None = None
    torchrun: Killed | None = None

    @property
    def both(self) -> tuple[Killed, ...]:
        """The runs in which a process was killed."""
        return tuple(killed for killed in (self.worker, self.torchrun) if killed)


@dataclass(frozen=True)
class Speeds:
    """How fast a program and the solution of its exercise are, started in turns.

    Attributes:
        own, solution: samples per second in the best epoch of each turn; empty: it wrote no log.
        failed: what was printed by the first of them that ended with an error; "" where none did.
    """

    own: tuple[float, ...]
    solution: tuple[float, ...]
    failed: str = ""


def last_error(text: str) -> str:
    """The last error in what a program printed, or its last line."""
    lines = [
        line.strip()
        for line in text.splitlines()
        if ("Error" in line or "error:" in line) and "ChildFailed" not in line  # torchrun's own
    ]
    return lines[-1][:300] if lines else (text.strip().splitlines() or ["no output"])[-1][:300]
