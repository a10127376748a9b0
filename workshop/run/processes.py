"""Run a training program: record its output, time and memory, and end all its processes."""

import ctypes
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from workshop.run.stillness import Patience, Watch

PR_SET_CHILD_SUBREAPER = 36  # of prctl() on Linux


@dataclass(frozen=True)
class Outcome:
    """The result of a program that ``launch`` ran.

    Attributes:
        status: its exit status; negative: the signal that ended it. None: it was ended because it made no progress.
        output: its standard output and standard error, as they came.
        seconds: from the start of the program to its end.
        peak_memory: the peak physical memory of its processes and the process that called ``launch`` together, in bytes.
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
    """Run ``command`` in ``folder`` until it ends.

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

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    # Whether the program computes does not matter here: a program that trains prints a line now and then.
    watch = Watch(lambda: [], Patience(idle=stall, busy=stall, total=math.inf))
    output, peak, next_sample, hangs = [], 0, start + 1, False
    try:
        while True:
            try:
                line = lines.get(timeout=0.25)
                if line is None:
                    break
                output.append(line)
                on_line(line)
            except queue.Empty:
                pass
            if watch.look(len(output)):
                hangs = True
                break
            if time.monotonic() > next_sample:
                peak = max(peak, _memory())
                next_sample = time.monotonic() + 2  # this takes about 40 ms of a core
        if not hangs:
            process.wait()
    finally:
        end_family(process)
    return Outcome(None if hangs else process.returncode, "".join(output), time.monotonic() - start, peak)


class Background:
    """A program that runs in the background, in a session of its own, with its output in a file.

    Args:
        command: the program and its options.
        folder: its working folder, which also contains the output file.
        environment: its whole environment.

    Attributes:
        process: the program.
        output: the file with its standard output and standard error.
    """

    def __init__(self, command: Sequence[object], folder: Path, environment: Mapping[str, str]):
        self.output = Path(folder) / f"output-{time.monotonic_ns()}.txt"
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        """Return what it has printed so far."""
        return self.output.read_text(errors="replace")

    def wait_for(self, line: str, timeout: float) -> bool:
        """Wait until it has printed ``line`` or has ended, at most ``timeout`` seconds; return whether it has printed it."""
        end = time.monotonic() + timeout
        while line not in self.text():
            if self.process.poll() is not None:
                return line in self.text()
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def wait(self, timeout: float) -> int | None:
        """Return its exit status, or None if it still runs after ``timeout`` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def workers(self) -> list[psutil.Process]:
        """Return the processes that torchrun started below it, by rank."""
        found = []
        for child in family(self.process.pid)[1:]:
            with suppress(psutil.Error):
                environment = child.environ()
                if "TORCHELASTIC_RUN_ID" in environment:
                    found.append((int(environment["RANK"]), child.create_time(), child))
        ranks: dict[int, psutil.Process] = {}
        for rank, _, child in sorted(found, key=lambda each: each[:2]):
            ranks.setdefault(rank, child)  # the oldest of a rank: its children have the same variables
        return list(ranks.values())

    def end(self, grace: float = 1) -> None:
        """End it and all processes that it started."""
        end_family(self.process, grace)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants, in this order; empty if there is no such process."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _memory() -> int:
    """Return the physical memory of this process and its descendants, in bytes; shared pages count once, on Linux."""
    total = 0
    for member in family(os.getpid()):
        try:
            memory = member.memory_full_info()
            total += getattr(memory, "pss", memory.rss)  # pss, Linux: a page that n processes share counts 1/n in each
        except psutil.Error:
            continue
    return total


def end_family(process: subprocess.Popen[Any], grace: float = 5) -> None:
    """End a program and all processes that it started: SIGTERM, and SIGKILL for what is left after ``grace`` seconds.

    This returns after a few times ``grace`` seconds, even if a process waits for the driver of a GPU and cannot be killed.
    """
    members = family(process.pid)
    for ending in ("terminate", "kill"):
        for member in members:
            with suppress(psutil.NoSuchProcess):
                getattr(member, ending)()
        members = psutil.wait_procs(members, timeout=grace)[1]
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)


def prctl(option: int, value: int) -> None:
    """Call prctl(2) of Linux; on other systems, do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of each process below this one that loses its parent, so that ``kill_below`` finds it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_below(pid: int, spared: Collection[int] = ()) -> None:
    """Kill all descendants of a process, including those started meanwhile, until none is left.

    Args:
        pid: the process. If it is this process, the children that have ended are waited for.
        spared: the ids of descendants that may continue.
    """
    killed: set[psutil.Process] = set()
    for turn in range(500):
        members = [member for member in family(pid)[1:] if member.pid not in spared]
        if not members:
            return
        for member in members:
            if member not in killed:
                killed.add(member)
                with suppress(psutil.NoSuchProcess):
                    member.kill()
        if pid == os.getpid():
            for member in members:
                with suppress(ChildProcessError):
                    os.waitpid(member.pid, os.WNOHANG)
        time.sleep(min(0.005 * (turn + 1), 0.05))


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM raise a KeyboardInterrupt in a with-block, so that the block ends the processes that it has started."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
