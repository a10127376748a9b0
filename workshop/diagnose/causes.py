"""Judge why a program stands still: each function looks at the scene for one family of causes, the clearest first."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from workshop.diagnose.calls import Difference, first_difference
from workshop.diagnose.evidence import Call, Diagnosis, Place, Rank, Scene

Cause = Callable[[Scene], Diagnosis | None]
BUSY = 0.3  # of one core: more than this is work
TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout")
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|Cannot allocate memory", re.I)
PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
SAME_ORDER = "All ranks must call the same collectives in the same order, with the same sizes and types."


def judge(scene: Scene) -> Diagnosis:
    """Return why the program stands still, or what is known if no cause is recognised."""
    for cause in CAUSES:
        if diagnosis := cause(scene):
            return diagnosis
    return unexplained(scene)


def names(ranks: Iterable[int | Rank]) -> str:
    """Return "rank 1", "ranks 0 and 2", "ranks 0 to 6" or the like."""
    numbers = sorted(rank.rank if isinstance(rank, Rank) else rank for rank in ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    shown = [str(number) for number in numbers[:8]] + (["others"] if len(numbers) > 8 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def verb(ranks: Sequence[object], one: str, many: str) -> str:
    """Return the form of a verb for one rank or for several."""
    return one if len(ranks) == 1 else many


def waits(ranks: Sequence[Rank]) -> str:
    """Return which ranks wait in which call, as a sentence; "": none waits."""
    waiting = [rank for rank in ranks if is_waiting(rank)]
    if not waiting:
        return ""
    return f"{names(waiting).capitalize()} {verb(waiting, 'waits', 'wait')} in {call_words(waiting[0])}."


def call_words(rank: Rank) -> str:
    """Return the call in which a rank waits, with its number if it is known, and its line."""
    pending, at = rank.pending(), rank.doing.place
    if pending and pending.place:
        return str(pending)
    place = f" ({at})" if at else ""
    if pending:
        return f"{pending.name} #{pending.number}" + (f" of the backward pass{place}" if rank.doing.what == "the backward pass" else place)
    return f"{rank.doing.what}{place}"


def is_waiting(rank: Rank) -> bool:
    """Return whether a rank waits for other ranks in a collective."""
    return rank.alive and (rank.doing.kind == "waits" or (rank.pending() is not None and rank.doing.kind not in OWN_REASONS))


# A rank that does one of these has a reason of its own to stand still, even if a collective of its is not complete.
OWN_REASONS = ("loads", "file", "sleep", "stopped", "child", "joins")


# --- a rank has ended ---------------------------------------------------------------------------------------------------------


def ended(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if a rank has ended and others are left, or all have ended with an error."""
    gone = [rank for rank in scene.ranks if not rank.alive]
    failed = [rank for rank in gone if rank.failure or rank.signal or rank.status]
    # A rank that lost its connection ended because of a different rank.
    # torchrun ends the others with SIGTERM.
    failed.sort(key=lambda rank: (_is_echo(rank), rank.signal == signal.SIGTERM, rank.failure.seconds if rank.failure else 0))
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
    hint = f" {skip} skips the step if a value is not finite: a decision of one rank alone." if skip else ""
    return Diagnosis(
        "skipped" if skip else "ended",
        f"{names(early).capitalize()} {verb(early, 'has', 'have')} ended without an error, while another rank was at {lost}.{hint}",
        "The other rank waited for a call of this rank, and lost its connection.",
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

    return rank.failure is not None and is_echo(rank.failure.message, rank.failure.kind) and not TIMED_OUT.search(rank.failure.message)


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
        "Correct this error. Errors of other ranks that mention a closed connection are its consequence.",
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
        "If the other ranks do long work on purpose (first compile, checkpoint, preparing data), give init_process_group a longer "
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
    more = " Signal 9 (SIGKILL) often comes from the kernel or from Slurm when memory runs out: see dmesg." if rank.signal == 9 else ""
    return Diagnosis(
        "killed",
        f"{rank.name.capitalize()} {how}.{last}{more}",
        waits(scene.alive) or "The other ranks lose their connection to it and end too.",
        "Find out who sent the signal: the log of the job (sacct -j JOBID --format=State,ExitCode,MaxRSS), dmesg, or a colleague.",
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
        "gloo aborts a rank that receives more bytes than it expects: the ranks used tensors of different sizes, or different calls.",
        f"{SAME_ORDER} Print the size of the tensor on each rank before this call, and look for a branch on the rank before it.",
        rank.doing.place,
    )


# --- the ranks have not found each other --------------------------------------------------------------------------------------


def interface(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if a variable names a network interface that the node of a rank does not have."""
    for rank in scene.ranks:
        there = scene.interfaces.get(rank.node)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            wanted = rank.settings.get(variable, "")
            plain = [name.lstrip("^=") for name in wanted.split(",") if name and not wanted.startswith("^")]
            if there and plain and not any(name.startswith(each) for name in there for each in plain):
                return Diagnosis(
                    "interface",
                    f"{variable}={wanted} names a network interface that {rank.node} ({rank.name}) does not have.",
                    f"Its interfaces are {', '.join(sorted(there))}. The ranks cannot connect to each other.",
                    f"Set {variable} to one of them (`ip addr` shows their addresses), or unset it.",
                )
    return None


def rendezvous(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if ranks wait in init_process_group for others."""
    joining = [rank for rank in scene.alive if rank.doing.kind == "joins"]
    if not joining:
        return None
    if different := _different_settings(scene.alive):
        return different
    first = joining[0]
    where = ":".join(first.settings[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in first.settings)
    late = [rank for rank in scene.alive if rank.doing.kind != "joins" and rank.rank >= 0]
    if late:
        rank = late[0]
        return Diagnosis(
            "rendezvous",
            f"{rank.name.capitalize()} has not called init_process_group: it is {rank.doing.words()}.",
            f"{names(joining).capitalize()} {verb(joining, 'waits', 'wait')} for it.",
            "All ranks must call init_process_group. Do long preparations afterwards, or give it a longer timeout.",
            rank.doing.place,
        )
    if first.rank < 0:
        return _agent(first)
    absent = sorted(set(range(first.world)) - {rank.rank for rank in scene.ranks})
    if absent:
        return Diagnosis(
            "rendezvous",
            f"{names(absent).capitalize()} of {first.world} {verb(absent, 'has', 'have')} not started, or not here.",
            f"{names(joining).capitalize()} {verb(joining, 'waits', 'wait')} in init_process_group"
            + (f" at {where}." if where else "."),
            "Start as many processes as WORLD_SIZE says, and give all of them the same MASTER_ADDR and MASTER_PORT.",
            first.doing.place,
        )
    return Diagnosis(
        "rendezvous",
        f"All {first.world or len(joining)} ranks wait in init_process_group, and cannot connect to each other.",
        f"They meet at {where}." if where else "",
        "Check that MASTER_ADDR is an address of the node of rank 0 that the other nodes reach, and that no firewall closes the "
        "ports. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network interface.",
        first.doing.place,
    )


def _different_settings(ranks: Sequence[Rank]) -> Diagnosis | None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        values: dict[str, list[int]] = {}
        for rank in ranks:
            if name in rank.settings:
                values.setdefault(rank.settings[name], []).append(rank.rank)
        if len(values) > 1:
            said = "; ".join(f"{names(them)}: {value}" for value, them in sorted(values.items()))
            return Diagnosis(
                "rendezvous",
                f"The ranks have different values of {name} ({said}).",
                "They wait in init_process_group for ranks that never come, or at different places.",
                f"Give all ranks the same {name}. On several nodes, give each torchrun the same --nnodes and --rdzv-endpoint.",
            )
    return None


def _agent(launcher: Rank) -> Diagnosis:
    command = launcher.settings.get("COMMAND", "torchrun")
    nodes = re.search(r"--nnodes[= ](\S+)", command)
    endpoint = re.search(r"--rdzv[-_]endpoint[= ](\S+)", command) or re.search(r"--master[-_]addr[= ](\S+)", command)
    place = f" at {endpoint[1]}" if endpoint else ""
    return Diagnosis(
        "rendezvous",
        f"torchrun on {launcher.node} waits for the other nodes{place}" + (f": --nnodes={nodes[1]}." if nodes else "."),
        "It starts the ranks only when torchrun runs on enough nodes, with the same --rdzv-endpoint and --rdzv-id.",
        "Start torchrun on each node (`srun --ntasks-per-node=1`), with the same --nnodes, --rdzv-endpoint and --rdzv-id, and "
        "check that the first node can be reached under this name and port.",
    )


# --- a rank is somewhere else -------------------------------------------------------------------------------------------------


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
    if rank.doing.kind == "loads":
        return _loader(rank, missed, why)
    fixes = {
        "file": (
            "file",
            "Look at the file system: `ls` of this folder, `df`, and the status page of the site. Read from a local disk if you can.",
        ),
        "lock": (
            "lock",
            "Find out who holds the lock: the stacks of all threads are in the folder of the report.",
        ),
        "stopped": ("stopped", f"Continue it with `kill -CONT {rank.pid}`, or find out who stopped it."),
        "child": ("child", "Look at the child process: its stack is in the folder of the report."),
        "network": ("network", "Look at the call: it waits for a server. Give it a time-out, and do it before the training."),
        "ends": ("skipped", f"{SAME_ORDER} Look at what makes {rank.name} leave its loop earlier."),
    }
    if rank.doing.kind in fixes:
        cause, fix = fixes[rank.doing.kind]
        return Diagnosis(cause, f"{rank.name.capitalize()}{missed} is {rank.doing.words()}.", why, fix, rank.doing.place)
    return _slow(rank, missed, why)


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
    worker = min(workers, key=lambda each: ORDER.index(each.doing.kind) if each.doing.place and each.doing.kind in ORDER else 99)
    place = worker.doing.place
    # A queue or a condition waits in a line of threading.py; a lock that is taken shows the line that takes it.
    takes_lock = worker.doing.stack[:1] == (place,) or "logging" in worker.doing.stack[0].file if worker.doing.stack else False
    if worker.doing.kind == "lock" and place and takes_lock:
        return Diagnosis(
            "fork",
            f"{subject}, whose worker waits for a lock ({place}).",
            "A fork copies a lock as it is. If a thread of the parent held it at that moment, nobody in the worker releases it. " + why,
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
    moves = rank.busy > BUSY or rank.doing.kind == "computes" or (rank.before is not None and rank.before.stack != rank.doing.stack)
    what = rank.doing.words() if rank.doing.kind != "unknown" or not moves else "computing" + (f" ({rank.doing.place})" if rank.doing.place else "")
    if moves or rank.doing.kind == "sleep":
        verdict = "It is slow, but it moves." if moves else "It may wake up again."
        return Diagnosis(
            "slow",
            f"{rank.name.capitalize()}{missed} is {what}. {verdict}",
            why,
            f"If only {rank.name} does this work, let the other ranks not wait for it, or share the work. If it is the same work as "
            "on the other ranks, look at its node and its GPU.",
            rank.doing.place,
        )
    return Diagnosis(
        "skipped", f"{rank.name.capitalize()}{missed} is {rank.doing.words()}.", why, SAME_ORDER, rank.doing.place
    )


# --- all ranks wait in collectives --------------------------------------------------------------------------------------------


def different_calls(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if the ranks wait in different collectives."""
    difference = first_difference(scene.alive)
    if difference is None:
        return _by_stack(scene.alive)
    ranks = {rank.rank: rank for rank in scene.ranks}
    if difference.kind in ("name", "size", "dtype"):
        return _different(difference, ranks)
    if difference.kind == "line":
        return _branch(difference, ranks)
    absent, there = difference.ranks(called=False), difference.ranks(called=True)
    call = difference.calls[there[0]]
    assert call is not None
    late = ranks[absent[0]]
    return Diagnosis(
        "skipped",
        f"{names(absent).capitalize()} never called {_words(call, ranks[there[0]])}: {verb(absent, 'it is', 'they are')} {late.doing.words()}.",
        waits([ranks[rank] for rank in there]),
        f"{SAME_ORDER} Look for a branch on the rank, or a loop of different length, around this call.",
        call.place or ranks[there[0]].doing.place,
    )


def _words(call: Call, rank: Rank) -> str:
    if call.place is None and rank.doing.place and not call.complete:
        return f"{call.name} #{call.number} of the backward pass ({rank.doing.place})"
    return str(call)


def _different(difference: Difference, ranks: dict[int, Rank]) -> Diagnosis:
    parts: dict[str, list[int]] = {}
    for rank, call in difference.calls.items():
        if call is not None:
            words = _words(call, ranks[rank]) + (f" with {call.shape()}" if difference.kind in ("size", "dtype") else "")
            parts.setdefault(words, []).append(rank)
    said = ", and ".join(f"{names(them)} called {words}" for words, them in parts.items())
    causes = {"name": "order", "size": "shape", "dtype": "dtype"}
    fixes = {
        "name": "Look for a branch on the rank, or a step that one rank skips, before this call.",
        "size": "Bring the tensors to one size first, or use all_gather_object or padding.",
        "dtype": "Convert the tensors to one dtype first.",
    }
    place = _rarest(difference, ranks) or ranks[_odd(parts.values())[-1]].doing.place
    what = {"name": "different collectives", "size": "tensors of different sizes", "dtype": "tensors of different dtypes"}
    return Diagnosis(
        causes[difference.kind],
        f"The ranks use {what[difference.kind]} in call #{difference.number}: {said}.",
        "A collective pairs the calls of all ranks by their order.",
        f"{SAME_ORDER} {fixes[difference.kind]}",
        place,
    )


def _rarest(difference: Difference, ranks: dict[int, Rank]) -> Place | None:
    """Return the line of the call that the ranks have made least often: a branch or a skip is more often around a rare call.

    Of equally rare ones, it is that of the ranks that differ from most of the others.
    """
    lines = [(call.place.file, call.place.line) for rank in ranks.values() for call in rank.calls or () if call.place]
    by_line: dict[Place, list[int]] = {}
    for rank, call in difference.calls.items():
        if call and call.place:
            by_line.setdefault(call.place, []).append(rank)
    return min(by_line, key=lambda at: (lines.count((at.file, at.line)), len(by_line[at]), -min(by_line[at])), default=None)


def _odd(groups: Iterable[list[int]]) -> list[int]:
    """Return the ranks that differ from most of the others; of two equal halves the one without the lowest rank."""
    return min(groups, key=lambda ranks: (len(ranks), -min(ranks)))


def _branch(difference: Difference, ranks: dict[int, Rank]) -> Diagnosis:
    groups: dict[str, list[int]] = {}
    for rank, call in difference.calls.items():
        if call is not None:
            groups.setdefault(str(call), []).append(rank)
    said = ", and ".join(f"{names(them)} called {words}" for words, them in groups.items())
    odd = _odd(groups.values())
    ahead = difference.calls[odd[-1]]
    skip = skipped_step([rank.doing.place for rank in ranks.values()] + [ahead.place if ahead else None])
    hint = f" {skip} skips the step if a value is not finite: a decision of one rank alone." if skip else ""
    return Diagnosis(
        "skipped",
        f"The ranks take different branches before call #{difference.number}: {said}.{hint}",
        "From then on each call of one rank meets a different call of the other ranks.",
        f"{SAME_ORDER} " + ("Let all ranks decide together: all_reduce the flag first." if skip else "Look for a branch that depends on the rank or on its data."),
        skip or (ahead.place if ahead else None),
    )


def skipped_step(places: Iterable[Place | None]) -> Place | None:
    """Return the line of the program that skips a step if a value is not finite; None: there is none."""
    for file in dict.fromkeys(place.file for place in places if place):
        try:
            lines = Path(file).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            if re.search(r"\bif\b.*(isnan|isfinite|isinf)", line) and re.search(r"\b(continue|return)\b", " ".join(lines[number - 1 : number + 3])):
                return Place(file, number)
    return None


def _by_stack(ranks: Sequence[Rank]) -> Diagnosis | None:
    """Return the diagnosis if only the stacks are known, and they show that the ranks wait in different calls."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.doing.kind == "waits" and not rank.calls:
            groups.setdefault(rank.doing.words(), []).append(rank.rank)
    if len(groups) < 2:
        return None
    said = ", and ".join(f"{names(them)} {verb(them, 'is', 'are')} {words}" for words, them in groups.items())
    odd = _odd(groups.values())[-1]
    kinds = {rank.doing.what for rank in ranks}
    place = next(rank.doing.place for rank in ranks if rank.rank == odd)
    return Diagnosis(
        "order" if len(kinds) > 1 else "skipped",
        f"The ranks wait in different calls: {said}.",
        "A collective pairs the calls of all ranks by their order.",
        f"{SAME_ORDER} Look for a branch on the rank, or a step that one rank skips, before these calls.",
        place,
    )


def absent(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if all ranks that were found wait for ranks that were not found."""
    world = max((rank.world for rank in scene.alive), default=0)
    gone = sorted(set(range(world)) - {rank.rank for rank in scene.ranks})
    if not gone or not any(is_waiting(rank) for rank in scene.alive):
        return None
    return Diagnosis(
        "ended",
        f"{names(gone).capitalize()} of {world} {verb(gone, 'was', 'were')} not found: {verb(gone, 'it has', 'they have')} ended, or "
        f"{verb(gone, 'runs', 'run')} on a different node.",
        waits(scene.alive),
        "Look at the end of the log of these ranks, and at the state of their nodes (sinfo, sacct).",
    )


def unexplained(scene: Scene) -> Diagnosis:
    """Return what is known if no cause was recognised."""
    if not scene.alive:
        return Diagnosis("nothing", "No process of the program runs.", fix="Name a program that runs, or its folder.")
    parts: dict[str, list[Rank]] = {}
    for rank in scene.alive:
        parts.setdefault(call_words(rank) if is_waiting(rank) else rank.doing.words(), []).append(rank)
    said = ", and ".join(f"{names(them) if them[0].rank >= 0 else them[0].name} {verb(them, 'is', 'are')} {words.removeprefix('in ') if False else (words if words.startswith(('in ', 'wait', 'comp', 'at ', 'stop')) else 'in ' + words)}" for words, them in parts.items())
    moving = any(rank.busy > BUSY for rank in scene.alive)
    return Diagnosis(
        "moves" if moving else "unknown",
        f"{said[0].upper()}{said[1:]}." + (" They compute: this is no hang." if moving else ""),
        "" if moving else "No known cause explains this.",
        "" if moving else "Send the folder of the report to somebody who knows the program. The native stacks in it show which C function waits.",
    )


CAUSES: tuple[Cause, ...] = (ended, interface, rendezvous, elsewhere, different_calls, absent)
