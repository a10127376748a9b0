"""Collect what can be seen of the ranks on this node: twice, some seconds apart, to tell a hang from slow work."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from workshop.diagnose import recorder
from workshop.diagnose.evidence import Doing, Process, Rank, Scene
from workshop.diagnose.programs import find_ranks, is_launcher, is_python, rank_of, settings_of
from workshop.diagnose.stacks import Stacks, py_spy, read_stacks, wanted_world, what_it_does

BETWEEN = 1.5  # seconds between the two looks


@dataclass
class Look:
    """One look at the processes of a node.

    Attributes:
        doing: what each rank does, by process ID.
        children: the other processes of each rank, by the process ID of the rank.
        seconds: the processor time of each rank and its children so far.
        transferred: the bytes that they have read and written so far.
        texts: all stacks as text, by process ID.
        problems: why stacks could not be read.
        at: the time of the look, as ``time.monotonic()``.
    """

    doing: dict[int, Doing] = field(default_factory=dict)
    children: dict[int, list[Process]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    transferred: dict[int, int] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    at: float = field(default_factory=time.monotonic)


def look(ranks: Mapping[int, psutil.Process]) -> Look:
    """Look at the ranks once.

    Args:
        ranks: the main process of each rank, by process ID.
    """
    seen = Look()
    for pid, process in ranks.items():
        stacks = _note(seen, pid)
        seen.doing[pid] = what_it_does(pid, stacks)
        seen.children[pid] = []
        members = [process]
        with suppress(psutil.Error):
            members += process.children(recursive=True)
        for child in members[1:]:
            if child.pid not in ranks and is_python(child):
                stacks = _note(seen, child.pid)
                worker = any(frame.function == "_worker_loop" for frame in stacks.main)
                seen.children[pid].append(Process(child.pid, what_it_does(child.pid, stacks), worker))
        seen.seconds[pid] = sum(map(_processor_seconds, members))
        seen.transferred[pid] = sum(map(_transferred, members))
    return seen


def _note(seen: Look, pid: int) -> Stacks:
    stacks = read_stacks(pid)
    seen.texts[pid] = stacks.text
    if stacks.problem and stacks.problem not in seen.problems:
        seen.problems.append(stacks.problem)
    return stacks


def _processor_seconds(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


def _transferred(process: psutil.Process) -> int:
    with suppress(psutil.Error, AttributeError):  # macOS has no such counters
        counters = process.io_counters()
        return int(counters.read_chars + counters.write_chars)
    return 0


def collect(
    members: Callable[[], Sequence[psutil.Process]], folder: Path | None = None, ended: Sequence[Rank] = ()
) -> tuple[Scene, dict[int, str]]:
    """Return what can be seen of a program on this node, and the stacks as text by process ID.

    Args:
        members: returns the processes of the program that are alive.
        folder: the folder with the sockets of the processes, if ``workshop diagnose`` started them.
        ended: ranks that are known to have ended.
    """
    processes = members()
    answers = {}
    if folder:
        with ThreadPoolExecutor(16) as together:  # a rank that holds Python's lock makes us wait
            asked = together.map(lambda each: (each.pid, recorder.ask(folder, each.pid)), processes)
            answers = {pid: answer for pid, answer in asked if answer and answer.rank >= 0}
    ranks = find_ranks(processes, [pid for pid, answer in answers.items() if answer.joined])
    if launchers := _waiting_launchers(processes, ranks):
        ranks = launchers
    first = look(ranks)
    time.sleep(BETWEEN)
    second = look({pid: process for pid, process in ranks.items() if process.is_running()})
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    found = [
        _rank(pid, process, answers.get(pid), first, second, node)
        for pid, process in ranks.items()
        if pid in second.doing
    ]
    known = {rank.rank for rank in found if rank.rank >= 0}
    found += [rank for rank in ended if rank.rank not in known]
    scene = Scene(
        ranks=tuple(sorted(found, key=lambda rank: (rank.rank, rank.pid))),
        interfaces={node: tuple(psutil.net_if_addrs())},
        missing=tuple(_missing(second, folder, answers, ranks)),
        killed_for_memory=killed_for_memory(),
        here=node,
    )
    return scene, second.texts


def _waiting_launchers(
    processes: Sequence[psutil.Process], ranks: Mapping[int, psutil.Process]
) -> dict[int, psutil.Process]:
    """Return torchrun itself if it has started no rank yet, because it waits for other nodes."""
    launchers = {each.pid: each for each in processes if is_launcher(each)}
    return launchers if launchers and set(ranks) <= set(launchers) else {}


def _rank(
    pid: int, process: psutil.Process, answer: recorder.Answer | None, first: Look, second: Look, node: str
) -> Rank:
    settings = settings_of(process)
    if is_launcher(process):
        with suppress(psutil.Error):
            settings["COMMAND"] = " ".join(process.cmdline())
    passed = max(second.at - first.at, 1e-3)
    world = answer.world if answer and answer.joined else 0
    if second.doing[pid].kind == "joins":
        world = wanted_world(pid)
    if not world and settings.get("WORLD_SIZE", "").isdigit():
        world = int(settings["WORLD_SIZE"])
    return Rank(
        rank=answer.rank if answer and answer.rank >= 0 else rank_of(settings),
        pid=pid,
        node=node,
        doing=second.doing[pid],
        before=first.doing.get(pid),
        busy=(second.seconds[pid] - first.seconds.get(pid, second.seconds[pid])) / passed,
        transferred=second.transferred[pid] - first.transferred.get(pid, second.transferred[pid]),
        calls=answer.calls if answer else None,
        children=tuple(second.children[pid]),
        settings=settings,
        world=world,
        lost_workers=lost_workers(process),
    )


def lost_workers(process: psutil.Process) -> tuple[int, ...]:
    """Return the children of a process that have ended and whose end it has not noticed (zombies)."""
    gone = []
    with suppress(psutil.Error):
        for child in process.children():
            with suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE:
                    gone.append(child.pid)
    return tuple(gone)


def _missing(
    seen: Look, folder: Path | None, answers: Mapping[int, recorder.Answer], ranks: Mapping[int, psutil.Process]
) -> list[str]:
    missing = [] if py_spy() is None else list(seen.problems)
    if py_spy() is None:
        missing.append("the lines of the program, because py-spy is not installed here (pip install py-spy)")
    if folder is None:
        missing.append(
            "the numbers of the collectives, because the program was not started with `workshop diagnose -- COMMAND`"
        )
    elif ranks and not any(answer.calls is not None for answer in answers.values()):
        missing.append("the numbers and sizes of the collectives, because no rank answered")
    return missing


def killed_for_memory() -> tuple[int, ...]:
    """Return the process IDs that the kernel says it has killed because memory ran out; empty if its log cannot be read."""
    with suppress(OSError, subprocess.TimeoutExpired):
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=2).stdout
        return tuple(int(pid) for pid in re.findall(r"Killed process (\d+)", log))
    return ()
