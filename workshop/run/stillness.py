"""Noticing that a run stands still: nothing moves, and nobody computes, or somebody computes for too long."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

BUSY_SHARE = 0.3  # of a core's time, or of the looks at the processes: more counts as computing


@dataclass(frozen=True)
class Patience:
    """How long a run may stand still, and last, in seconds.

    Attributes:
        idle: without progress while nobody computes: the processes wait for each other.
        busy: without progress while somebody computes.
        total: of the whole run.
    """

    idle: float = 3.5
    busy: float = 12
    total: float = 60


class Watch:
    """Watches a run. The clock starts when the object is made.

    Args:
        processes: gives the processes of the run that are alive.
        patience: how long it may stand still.
    """

    def __init__(self, processes: Callable[[], list[psutil.Process]], patience: Patience):
        self.processes, self.patience = processes, patience
        self._start = self._moved = time.monotonic()
        self._progress: object = object()  # equal to nothing: the first look counts as progress
        self._processor_seconds_then = 0.0
        self._looks = self._runnable = 0

    def look(self, progress: object) -> str:
        """Look at the run; call this about ten times a second.

        Args:
            progress: something that changes whenever the run moves: the size of its output, say.

        Returns:
            "" while the run moves; "idle": it stands still and nobody computes; "busy": it stands still and somebody computes;
            "long": it has lasted longer than ``patience.total``, moving or not.
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
        # A gloo rank that waits takes next to no processor time. A process that computes on a crowded machine gets little of it
        # too, but it is runnable in most looks.
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
        """Whether some process computes, waits for a processor, or waits for the disk."""
        for process in self.processes():
            with suppress(psutil.Error):
                if process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
                    return True
        return False
