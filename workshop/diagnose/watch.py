"""``workshop diagnose -- COMMAND``: run a program as it is, and report when it hangs or has failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from workshop.diagnose import recorder
from workshop.diagnose.causes import judge
from workshop.diagnose.causes.words import BUSY, is_waiting
from workshop.diagnose.collect import collect, killed_for_memory
from workshop.diagnose.evidence import Diagnosis, Failure, Rank, Scene
from workshop.diagnose.programs import own_place
from workshop.diagnose.report import show
from workshop.diagnose.stacks import from_stack
from workshop.errors import UserError
from workshop.run.failures import LAUNCHER_ERRORS
from workshop.run.processes import end_family, family

BOOT = Path(__file__).with_name("boot")
EVERY = 2.0  # seconds between two questions to the ranks
PATIENCE = 10.0  # seconds without progress before the first look
SLOW = 30.0  # the same before slow work is reported: it is no hang
FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}
FROM_KERNEL = 128  # si_code: the terminal has sent the signal to the program as well
CHILD_ERROR = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)")
SPAWN_ERROR = re.compile(r"[Pp]rocess (\d+) terminated with (?:signal SIG(\w+)|exit code (\d+))")


@dataclass
class Seen:
    """What is remembered of a run.

    Attributes:
        progress: what the processes said last.
        moved: when this changed, as ``time.monotonic()``.
        scene: the last look at a run that made no progress; None: none.
        looked: when this was, as ``time.monotonic()``.
        reported: the cause of the last report; "": none since the program moved.
    """

    progress: object = None
    moved: float = field(default_factory=time.monotonic)
    scene: Scene | None = None
    looked: float = 0.0
    reported: str = ""


def run_watched(command: Sequence[str], output: str = "", patience: float = PATIENCE, end: bool = False) -> int:
    """Run a command, and report on standard error when it hangs or fails.

    Args:
        command: the program and its options. It gets the standard input and output of this process, and its signals.
        output: the folder of the report; "": diagnosis-DATE-TIME in the current folder. It is created only for a report.
        patience: seconds without progress before the first look.
        end: whether to end a program that hangs.

    Returns:
        its exit status; if a signal ended it, this process ends by the same signal. 1: ``end`` has ended it.

    Raises:
        UserError: the command cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="diagnose-") as name:
        folder = Path(name)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # _watch() receives them
        try:
            process = _start(command, folder, before)
            ended_by_us = _watch(process, folder, output, patience, end)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 1 if ended_by_us else leave_as(process.returncode)


def _start(command: Sequence[str], folder: Path, mask: set[int | signal.Signals]) -> subprocess.Popen[bytes]:
    """Start the program with the signal mask that this process had."""

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        return subprocess.Popen(command, env=variables(os.environ, folder), preexec_fn=restore)
    except OSError as error:
        raise UserError(f"{command[0]}: {os.strerror(error.errno or 0)}") from None


def variables(environment: dict[str, str] | os._Environ[str], folder: Path) -> dict[str, str]:
    """Return the environment in which the processes of a program answer, and PyTorch records the collectives."""
    path = [str(BOOT), *filter(None, [environment.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(path), "WORKSHOP_DIAGNOSE": str(folder)}
    return {"TORCH_FR_BUFFER_SIZE": "2000", **environment, **own}


def leave_as(status: int) -> int:
    """Return an exit status, or end this process by the signal that ended the program."""
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _watch(process: subprocess.Popen[bytes], folder: Path, output: str, patience: float, end: bool) -> bool:
    """Watch until the program has ended; return whether this function has ended it."""
    seen = Seen()
    ask_next = time.monotonic() + EVERY
    while process.poll() is None:
        # A program that ends in the meantime sends SIGCHLD, which is not among these, so the wait is short.
        if info := signal.sigtimedwait(FORWARDED, 0.2):
            if info.si_code != FROM_KERNEL:
                with suppress(ProcessLookupError):
                    process.send_signal(info.si_signo)
            continue
        if time.monotonic() < ask_next:
            continue
        diagnosis = _look(process.pid, folder, seen, patience)
        ask_next = time.monotonic() + EVERY
        if diagnosis and seen.scene:
            _report(diagnosis, seen, folder, output)
            if end and diagnosis.cause not in ("slow", "moves", "unknown"):
                end_family(process)
                print(f"workshop diagnose: ended the program. {diagnosis.line}", file=sys.stderr)
                return True
    if process.returncode:
        _after_end(process.returncode, folder, seen, output)
    return False


def _look(pid: int, folder: Path, seen: Seen, patience: float) -> Diagnosis | None:
    """Return a diagnosis if the program makes no progress and this was not reported yet."""
    members = family(pid)
    progress = [
        (each.pid, recorder.progress(folder, each.pid)) for each in members if (folder / f"{each.pid}.socket").exists()
    ]
    still = time.monotonic() - seen.moved
    if progress != seen.progress:
        if seen.reported:
            print(f"workshop diagnose: the program makes progress again after {still:.0f} s", file=sys.stderr)
        seen.progress, seen.moved, seen.reported = progress, time.monotonic(), ""
        return None
    if still < min(3.0, patience) or (still < patience and time.monotonic() - seen.looked < 4):
        return None
    scene, _ = collect(lambda: family(pid), folder)
    seen.scene, seen.looked = replace(scene, seconds=still), time.monotonic()
    if still < patience:
        return None  # this look serves only to know what each rank did, if one of them gives up soon
    diagnosis = judge(seen.scene)
    if diagnosis.cause in ("slow", "moves", "unknown") and still < max(SLOW, patience):
        return None
    if diagnosis.cause in ("moves", "nothing", seen.reported):  # "nothing": the program is just ending
        return None
    if diagnosis.cause != "slow" and any(_works(rank) for rank in scene.alive):
        return None
    seen.reported = diagnosis.cause
    return diagnosis


def _works(rank: Rank) -> bool:
    """Return whether a rank that waits for no other rank uses the processor."""
    return not is_waiting(rank) and rank.busy > BUSY and rank.doing.kind not in ("loads", "joins")


def _report(diagnosis: Diagnosis, seen: Seen, folder: Path, output: str) -> None:
    assert seen.scene is not None
    scene = replace(seen.scene, ranks=tuple(_with_failure(rank, folder) for rank in seen.scene.ranks))
    show(diagnosis, scene, output, f"no progress for {scene.seconds:.0f} s")


def _with_failure(rank: Rank, folder: Path) -> Rank:
    failure = None if rank.alive else recorder.failure(folder, rank.pid)
    return replace(rank, failure=failure) if failure else rank


def _after_end(status: int, folder: Path, seen: Seen, output: str) -> None:
    """Report which rank failed first, if this is known."""
    ranks = ended_ranks(folder, seen.scene)
    if not any(rank.failure or rank.signal or rank.status for rank in ranks):
        return
    scene = replace(seen.scene or Scene(()), ranks=tuple(ranks), missing=(), killed_for_memory=killed_for_memory())
    diagnosis = judge(scene)
    how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
    show(diagnosis, scene, output, f"the program has ended {how}")


def ended_ranks(folder: Path, last: Scene | None) -> list[Rank]:
    """Return the ranks of a program that has ended: their exceptions, and what the launcher says of those without one.

    Args:
        folder: the folder into which the processes have written their exceptions.
        last: the last look at the program, when it made no progress; None: there was none.
    """
    before = {rank.pid: rank for rank in (last.ranks if last else ())}
    ranks: dict[int, Rank] = {}

    def add(number: int, pid: int, **changes: Any) -> None:
        failure = changes.get("failure")
        stack = failure.stack if failure and failure.stack else recorder.last_stack(folder, pid)
        rank = before.get(pid) or Rank(number, pid)
        if stack and own_place(stack):
            rank = replace(rank, doing=from_stack(stack))
        ranks[number] = replace(rank, rank=number, alive=False, **changes)

    launchers = []
    for note in sorted(folder.glob("*.failure")):
        pid, number = int(note.stem), recorder.rank_of(note)
        failure = recorder.failure(folder, pid)
        if failure and failure.kind in LAUNCHER_ERRORS:
            launchers.append(failure)
        elif failure and failure.kind not in ("SignalException", "KeyboardInterrupt"):
            add(number, pid, failure=failure)
    for note in folder.glob("*.ended"):
        add(recorder.rank_of(note), int(note.stem), status=0)
    for failure in launchers:
        for number, status, pid in _launcher_says(failure):
            if number not in ranks:
                spawned = _spawned(failure) if pid == 0 and status > 0 and "Traceback" in failure.message else None
                add(number, pid, signal=max(0, -status), status=max(0, status), failure=spawned)
    for pid, rank in before.items():
        if rank.rank not in ranks and rank.rank >= 0:
            ranks[rank.rank] = rank if psutil.pid_exists(pid) else replace(rank, alive=False)
    return [ranks[number] for number in sorted(ranks)]


def _launcher_says(failure: Failure) -> list[tuple[int, int, int]]:
    """Return rank, exit status (negative: the signal) and process ID of each process of which a launcher reports the end."""
    found = [(int(rank), int(status), int(pid)) for rank, status, pid in CHILD_ERROR.findall(failure.message)]
    for rank, name, status in SPAWN_ERROR.findall(failure.message):
        found.append((int(rank), -int(getattr(signal, f"SIG{name}")) if name else int(status), 0))
    if spawned := re.search(r"-- Process (\d+) terminated with the following error", failure.message):
        found.append((int(spawned[1]), 1, 0))
    return found


def _spawned(failure: Failure) -> Failure:
    """Return the exception of a rank, which mp.spawn puts into the message of its own."""
    lines = failure.message.strip().splitlines()
    kind, _, message = lines[-1].partition(": ")
    return Failure(kind.rpartition(".")[2], message, failure.message, None, failure.seconds)
