"""Running a training program from outside: its output line by line, its time, its memory, and no process left behind."""

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Outcome:
    """What became of a program that ``launch`` ran.

    Attributes:
        status: its exit status; negative: the signal that ended it. None: it was ended because it stood still.
        output: its standard output and standard error, as they came.
        seconds: from the start of the program to its end.
        peak_memory: the most physical memory that its processes and the one that called ``launch`` had together, in bytes.
    """

    status: int | None
    output: str
    seconds: float
    peak_memory: int


def launch(
    command: Sequence[str],
    environment: dict[str, str],
    folder: Path,
    on_line: Callable[[str], None],
    stall: float = 300,
) -> Outcome:
    """Run ``command`` in ``folder`` to its end.

    Args:
        command: the program and its arguments.
        environment: its whole environment.
        folder: its working folder.
        on_line: called with each line of output as it comes.
        stall: seconds without a line after which the program counts as hanging and is ended.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read():
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    output, peak, last_line, next_sample, hangs = [], 0, start, start + 1, False
    try:
        while True:
            try:
                line = lines.get(timeout=0.25)
                if line is None:
                    break
                output.append(line)
                on_line(line)
                last_line = time.monotonic()
            except queue.Empty:
                if time.monotonic() - last_line > stall:
                    hangs = True
                    break
            if time.monotonic() > next_sample:
                peak = max(peak, _memory())
                next_sample = time.monotonic() + 2  # looking costs some 40 ms of a core
        if not hangs:
            process.wait()
    finally:
        end_family(process)
    return Outcome(None if hangs else process.returncode, "".join(output), time.monotonic() - start, peak)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _memory() -> int:
    """The physical memory of this process and all it started, in bytes: shared pages count once (where the system can tell)."""
    total = 0
    for member in _family(os.getpid()):
        try:
            memory = member.memory_full_info()
            total += getattr(memory, "pss", memory.rss)  # pss, Linux: a page that n processes share counts 1/n in each
        except psutil.Error:
            continue
    return total


def end_family(process: subprocess.Popen, grace: float = 5) -> None:
    """End a program and all processes that it started: SIGTERM, and SIGKILL for what is left after ``grace`` seconds."""
    family = _family(process.pid)
    for signal in ("terminate", "kill"):
        for member in family:
            try:
                getattr(member, signal)()
            except psutil.NoSuchProcess:
                continue
        family = psutil.wait_procs(family, timeout=grace)[1]
    process.wait()
