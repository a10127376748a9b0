"""Causes in which some ranks wait in a collective, and another is not in one."""

from __future__ import annotations

from workshop.diagnose.causes.words import LITTLE, SAME_ORDER, call_words, is_waiting, moves, waits
from workshop.diagnose.evidence import Diagnosis, Rank, Scene


def elsewhere(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if some ranks wait in a collective, and another is not in one."""
    waiting = [rank for rank in scene.alive if is_waiting(rank)]
    others = [rank for rank in scene.alive if not is_waiting(rank)]
    if not others:
        return None
    rank = min(others, key=lambda each: ORDER.index(each.doing.kind) if each.doing.kind in ORDER else len(ORDER))
    if not waiting and rank.doing.kind not in ("loads", "file", "lock", "stopped"):
        return None
    missed = f" never called {call_words(waiting[0])}: it" if waiting else ""
    why = waits(scene.alive)
    if moves(rank) and rank.doing.kind not in ("stopped", "child", "ends"):
        return _slow(rank, missed, why)
    if rank.doing.kind == "loads":
        return _loader(rank, missed, why)
    fixes = {
        "file": (
            "file",
            "Look at the file system: `ls` of this folder, `df`, and the status page of the site. Use a local disk if you can.",
        ),
        "lock": (
            "lock",
            "Find out which thread holds the lock: the folder of the report contains the stacks of all threads.",
        ),
        "stopped": ("stopped", f"Resume it with `kill -CONT {rank.pid}`, or find out who stopped it."),
        "child": ("child", "Find out why the child process does not end: the folder of the report contains its stack."),
        "network": (
            "network",
            "This call waits for a server. Give it a timeout, and make it before the training.",
        ),
        "ends": ("skipped", f"{SAME_ORDER} Look at what makes {rank.name} leave its loop earlier."),
    }
    if rank.doing.kind in fixes:
        cause, fix = fixes[rank.doing.kind]
        return Diagnosis(
            cause, f"{rank.name.capitalize()}{missed} is {rank.doing.words()}.", why, fix, rank.doing.place
        )
    return Diagnosis(
        "skipped", f"{rank.name.capitalize()}{missed} is {rank.doing.words()}.", why, SAME_ORDER, rank.doing.place
    )


ORDER = ("stopped", "loads", "file", "lock", "child", "network", "ends", "sleep", "unknown", "computes")


def _loader(rank: Rank, missed: str, why: str) -> Diagnosis:
    workers = [child for child in rank.children if child.worker]
    at = f" ({rank.doing.place})" if rank.doing.place else ""
    subject = f"{rank.name.capitalize()}{missed} is in the DataLoader{at}"
    if rank.lost_workers or not workers:
        return Diagnosis(
            "worker",
            f"{subject}, waiting for a worker that was killed.",
            why,
            "A worker is often killed because memory ran out: use fewer workers, or ask for more memory. Give the DataLoader a "
            "timeout, so that it fails instead of waiting.",
            rank.doing.place,
        )
    worker = min(
        workers, key=lambda each: ORDER.index(each.doing.kind) if each.doing.place and each.doing.kind in ORDER else 99
    )
    place = worker.doing.place
    # A queue or a condition waits in a line of threading.py; a lock that is taken shows the line that takes it.
    takes_lock = (
        worker.doing.stack[:1] == (place,) or "logging" in worker.doing.stack[0].file if worker.doing.stack else False
    )
    if worker.doing.kind == "lock" and place and takes_lock:
        return Diagnosis(
            "fork",
            f"{subject}, whose worker waits for a lock ({place}).",
            "A fork copies a lock as it is. If a thread of the parent held it at that moment, no thread in the worker releases "
            "it. " + why,
            "Create the lock in the worker (worker_init_fn), do not hold it while the DataLoader starts, or use "
            "multiprocessing_context='spawn'.",
            place,
        )
    return Diagnosis(
        "loader",
        f"{subject}, whose worker is {worker.doing.words()}.",
        why,
        "Look at what the data set does at this line. Give the DataLoader a timeout, so that it fails instead of waiting.",
        place or rank.doing.place,
    )


def _slow(rank: Rank, missed: str, why: str) -> Diagnosis:
    asleep = rank.doing.kind == "sleep" and rank.busy <= LITTLE
    what = rank.doing.words()
    if rank.doing.kind in ("lock", "unknown", "network"):  # an operation of PyTorch waits for its threads
        what = "computing" + (f" ({rank.doing.place})" if rank.doing.place else "")
    return Diagnosis(
        "slow",
        f"{rank.name.capitalize()}{missed} is {what}. {'It may wake up again.' if asleep else 'It is slow, but it moves.'}",
        why,
        f"If only {rank.name} does this work, do not make the other ranks wait for it, or divide the work among the "
        "ranks. If the other ranks do the same work, look at the node and the GPU of this rank.",
        rank.doing.place,
    )
