"""Causes in which a rank has ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from workshop.diagnose.causes.differing import skipped_step
from workshop.diagnose.causes.words import SAME_ORDER, names, verb, waits
from workshop.diagnose.evidence import Diagnosis, Place, Rank, Scene

TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout")
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|Cannot allocate memory", re.I)
PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")


def ended(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if a rank has ended and others are left, or all have ended with an error."""
    gone = [rank for rank in scene.ranks if not rank.alive]
    failed = [rank for rank in gone if rank.failure or rank.signal or rank.status]
    # A rank that lost its connection ended because of a different rank.
    # torchrun ends the others with SIGTERM.
    failed.sort(
        key=lambda rank: (_is_echo(rank), rank.signal == signal.SIGTERM, rank.failure.seconds if rank.failure else 0)
    )
    early = [rank for rank in gone if rank not in failed]
    if failed and not (early and all(map(_is_echo, failed))):
        return _failed(scene, failed[0])
    if early and (failed or scene.alive):
        gone, first = early, early[0]
        lost = next((rank.failure.place for rank in failed if rank.failure and rank.failure.place), None)
        if lost:
            return _ended_early(early, lost)
        return Diagnosis(
            "ended",
            f"{names(gone).capitalize()} {verb(gone, 'has', 'have')} ended without an error, and the other ranks still run.",
            waits(scene.alive),
            f"{SAME_ORDER} Look at what makes {first.name} leave its loop earlier, such as fewer batches, or a return or break.",
        )
    return None


def _ended_early(early: Sequence[Rank], lost: Place) -> Diagnosis:
    skip = skipped_step([lost])
    hint = f" {skip} skips the step if a value is not finite, and each rank decides this alone." if skip else ""
    return Diagnosis(
        "skipped" if skip else "ended",
        f"{names(early).capitalize()} {verb(early, 'has', 'have')} ended without an error, while another rank was at "
        f"{lost}.{hint}",
        "The other rank waited for a call of this rank and lost the connection to it.",
        f"{SAME_ORDER} "
        + (
            "Let all ranks decide together: all_reduce the flag first."
            if skip
            else f"Look at what makes {early[0].name} leave its loop earlier, such as fewer batches, or a return or break."
        ),
        skip or lost,
    )


def _is_echo(rank: Rank) -> bool:
    from workshop.run.failures import is_echo

    return (
        rank.failure is not None
        and is_echo(rank.failure.message, rank.failure.kind)
        and not TIMED_OUT.search(rank.failure.message)
    )


def _failed(scene: Scene, rank: Rank) -> Diagnosis:
    failure, at = rank.failure, ""
    if failure is None:
        return _killed(scene, rank)
    at = f" ({failure.place})" if failure.place else ""
    message = failure.message.strip().splitlines()[0][:200] if failure.message.strip() else ""
    if OUT_OF_MEMORY.search(failure.kind + failure.message):
        return Diagnosis(
            "memory",
            f"{rank.name.capitalize()} ran out of memory{at}: {failure.kind}: {message}",
            waits(scene.alive) or "The other ranks lose their connection to it and end too.",
            "Use a smaller batch per rank, activation checkpointing, or shard the model (FSDP). If only this rank runs out of "
            "memory, look for work that only it does, and for processes that share its GPU.",
            failure.place,
        )
    if TIMED_OUT.search(failure.message) and "Timeout" not in failure.kind:
        return _timed_out(scene, rank)
    if PORT_TAKEN.search(failure.message):
        return Diagnosis(
            "port",
            f"{rank.name.capitalize()} cannot open the port for the rendezvous{at}: {message}",
            "A different program, or an earlier run that has not ended, uses this port.",
            "Let torchrun choose a free port (--standalone, or --rdzv-endpoint=HOST:0 on one node), or end the earlier run.",
            failure.place,
        )
    return Diagnosis(
        "error",
        f"{rank.name.capitalize()} failed first{at}: {failure.kind}: {message}",
        waits(scene.alive) or "The other ranks lose their connection to it and end too.",
        "Correct this error. If other ranks report a closed connection, this error is the cause.",
        failure.place,
    )


def _timed_out(scene: Scene, rank: Rank) -> Diagnosis:
    failure = rank.failure
    assert failure is not None
    at = f" ({failure.place})" if failure.place else ""
    others = [other for other in scene.ranks if other.rank != rank.rank and other.doing.place]
    late = next((other for other in others if other.doing.kind not in ("waits", "joins")), None)
    seen = f" {late.name.capitalize()} was {late.doing.words()}." if late else ""
    limit = re.search(r"(\d+) ?ms|Timeout\(ms\)=(\d+)", failure.message)
    after = f" after {int(limit[1] or limit[2]) / 1000:g} s" if limit else ""
    return Diagnosis(
        "timeout",
        f"{rank.name.capitalize()} gave up waiting for the other ranks{after}{at}.{seen}",
        "A collective fails if the other ranks do not call it within the time-out of the process group.",
        "If the other ranks do long work on purpose (first compile, checkpoint, data preparation), give init_process_group a "
        "longer "
        "timeout. Otherwise find out why they are late.",
        late.doing.place if late else failure.place,
    )


def _killed(scene: Scene, rank: Rank) -> Diagnosis:
    if rank.signal == signal.SIGABRT and rank.doing.kind == "waits":
        return _aborted(scene, rank)
    last = f" It was {rank.doing.words()}." if rank.doing.place else ""
    if rank.pid in scene.killed_for_memory:
        return Diagnosis(
            "memory",
            f"The kernel killed {rank.name} because the memory of the node ran out.{last}",
            waits(scene.alive) or "The other ranks lose their connection to it and end too.",
            "Ask Slurm for more memory (--mem), use fewer DataLoader workers, or load the data in parts.",
            rank.doing.place,
        )
    how = f"was killed by signal {rank.signal}" if rank.signal else f"ended with exit status {rank.status}"
    more = (
        " Signal 9 (SIGKILL) often comes from the kernel or from Slurm when memory runs out: see dmesg."
        if rank.signal == 9
        else ""
    )
    return Diagnosis(
        "killed",
        f"{rank.name.capitalize()} {how}.{last}{more}",
        waits(scene.alive) or "The other ranks lose their connection to it and end too.",
        "Find out who sent the signal: see the log of the job (sacct -j JOBID --format=State,ExitCode,MaxRSS) and dmesg.",
        rank.doing.place,
    )


def _aborted(scene: Scene, rank: Rank) -> Diagnosis:
    others: dict[str, list[Rank]] = {}
    for other in scene.ranks:
        if other is not rank and other.doing.place:
            others.setdefault(other.doing.words(), []).append(other)
    said = "; ".join(f"{names(them)} {verb(them, 'was', 'were')} {words}" for words, them in others.items())
    return Diagnosis(
        "shape",
        f"{rank.name.capitalize()} was aborted {rank.doing.words()}" + (f"; {said}." if said else "."),
        "gloo aborts a rank that receives more bytes than it expects. The ranks used tensors of different sizes, or different "
        "calls.",
        f"{SAME_ORDER} Print the size of the tensor on each rank before this call, and look for a branch on the rank above it.",
        rank.doing.place,
    )
