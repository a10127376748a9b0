"""Notice that a run hangs: it makes no progress, and no process computes, or one computes for too long."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

BUSY_SHARE = 0.3  # of the time of a core, or of the checks: more than this counts as computing


@dataclass(frozen=True)
class Patience:
    """How long a run may make no progress, and how long it may last, in seconds.

    Attributes:
        idle: without progress while no process computes: the processes wait for each other.
        busy: without progress while a process computes.
        total: of the whole run.
    """

    idle: float = 3.5
    busy: float = 12
    total: float = 60


class Watch:
    """Watch a run. The clock starts when the object is created.

    Args:
        processes: returns the processes of the run that are alive.
        patience: how long it may make no progress.
    """

    def __init__(self, processes: Callable[[], list[psutil.Process]], patience: Patience):
        self.processes, self.patience = processes, patience
        self._start = self._moved = time.monotonic()
        self._progress: object = object()  # equal to nothing: the first check counts as progress
        self._processor_seconds_then = 0.0
        self._looks = self._runnable = 0

    def look(self, progress: object) -> str:
        """Check the run; call this about ten times per second.

        Args:
            progress: something that changes whenever the run makes progress, such as the size of its output.

        Returns:
            "" while the run may continue; "idle": it makes no progress and no process computes; "busy": it makes none and a
            process computes; "long": it has lasted longer than ``patience.total``.
        """
        now = time.monotonic()
        if now - self._start > self.patience.total:
            return "long"
        if progress != self._progress:
            self._progress, self._moved = progress, now
            self._processor_seconds_then = self._processor_seconds()
            self._looks = self._runnable = 0
            return ""
        self._looks += 1
        self._runnable += self._is_runnable()
        still = now - self._moved
        if still <= self.patience.idle:
            return ""
        # A gloo rank that waits uses almost no processor time. A process that computes on a busy machine gets little of it
        # too, but it is runnable in most checks.
        seconds = self._processor_seconds() - self._processor_seconds_then
        if seconds <= BUSY_SHARE * still and self._runnable <= BUSY_SHARE * self._looks:
            return "idle"
        return "busy" if still > self.patience.busy else ""

    def _processor_seconds(self) -> float:
        total = 0.0
        for process in self.processes():
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _is_runnable(self) -> bool:
        """Return whether a process computes, waits for a processor, or waits for the disk."""
        for process in self.processes():
            with suppress(psutil.Error):
                if process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
                    return True
        return False
