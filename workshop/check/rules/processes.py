"""Processes, the group that they join, and the device that each takes."""

import itertools
import re

from workshop.check.evidence.events import Backward, DeviceChosen, GroupDestroyed, Joined, Joining, Started, StoreOpened
from workshop.check.evidence.run import Run
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import SINGLE, SPLIT, TWO_NODES, WHOLE, Split

LOCAL = ("127.0.0.1", "localhost", "::1")


@rule(
    why="torchrun has set the address at which its processes meet; with a different one they never find each other.",
    fix="Do not set MASTER_ADDR or MASTER_PORT; call init_process_group without an address, which takes torchrun's.",
    blocks=True,
    anywhere=True,
)
def address_overwritten(run: Run) -> Said:
    """The program changed the address that torchrun had set."""
    for event in run.all(Joining) if run.launch == "torchrun" else ():
        port = ("MASTER_PORT", event.given_port, event.port)
        address = ("MASTER_ADDR", event.given_address, event.address)
        for name, given, used in (port, address):
            if given and used != given:
                there = ": on a second machine that would be the wrong one" if used in LOCAL else ""
                yield Seen(f"{name} was {given} and is {used} at init_process_group{there}", event.where)
                return


@rule(
    why="Processes that are in no common group each train a model of their own.",
    fix="Call torch.distributed.init_process_group in every process, with its rank and the number of processes.",
    blocks=True,
    anywhere=True,
)
def no_group(run: Run) -> Said:
    """No process joined a group."""
    if run.nproc == 1 or any(process.rank is not None for process in run.processes):
        return
    found = run.first_exception()
    lightnings = found is not None and "/lightning/" in found[1].traceback  # Lightning itself says what it refuses
    if run.failed and (run.asked is None or run.hung or run.flooded or lightnings):
        return  # how it ended explains more
    trained = [process for process in run.processes if process.first(Backward)]
    joining = any(run.all(Joining))  # that failed or hangs: other rules say so
    if len(trained) > 1:
        yield Seen(f"{len(trained)} processes train, and none has joined a process group")
    elif trained and not joining:
        yield Seen("one process trains, in no process group", trained[0].data_where)
    elif not joining:
        yield Seen("no process has joined a process group")


@rule(
    why="The group has to contain all processes that were started, each with a rank of its own.",
    fix="Give init_process_group the rank of this process and the number of all processes; under torchrun leave both out.",
    blocks=True,
    anywhere=True,
)
def wrong_group(run: Run) -> Said:
    """The group has the wrong size, or its ranks are not the launcher's."""
    joined = [process for process in run.processes if process.rank is not None]
    if run.nproc == 1 or not joined:
        return
    groups = [process.of(Joined)[-1] for process in joined]
    where, sizes = groups[0].where, {group.world_size for group in groups}
    if len(joined) > run.nproc:
        parents = {event.parent for process in joined for event in process.of(Started)}
        by = sum(process.pid in parents for process in run.processes) if run.launch == "torchrun" else 0
        more = f"; {plural(by, 'process')} of those that were started started them" if by else ""
        yield Seen(f"{len(joined)} processes have joined a group, and {run.nproc} were started to do so{more}", where)
    elif sizes != {run.nproc}:
        yield Seen(f"the group has {plural(min(sizes), 'process')} where {run.nproc} were started", where)
    elif run.launch == "torchrun":
        for process in joined:
            started = process.first(Started)
            if started and started.rank is not None and int(started.rank) != process.rank:
                text = f"the process that torchrun calls rank {started.rank} has joined as rank {process.rank}"
                yield Seen(text, where)
                return


@rule(
    why="The rank counts over all machines, but the devices of a machine only over its own: on a second machine this fails.",
    fix="Choose the device by LOCAL_RANK: torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK'])).",
    runs=TWO_NODES,
    anywhere=True,
)
def device_index(run: Run) -> Said:
    """On two machines each process has to take the device with its local rank."""
    for process in run.processes:
        for started, event in itertools.product(process.of(Started), process.of(DeviceChosen)):
            if started.local_rank is not None and event.index not in (None, int(started.local_rank)):
                who = f"rank {started.rank} (local rank {started.local_rank})"
                machines = f"on two machines of {run.nproc // 2} devices"
                yield Seen(f"{machines}, {who} asks for device {event.index}", event.where)
                return
    if run.processes and not any(run.all(DeviceChosen)):
        yield Seen("with two devices on each machine, no process asks for one: all would take the first")


@rule(
    why="Two people on one machine would collide at this port.",
    fix="Let the system choose a free port: a TCPStore with port 0, or torchrun, which chooses one.",
    runs=(WHOLE, SPLIT),
)
def port_fixed(run: Run, split: Split) -> Said:
    """Two runs met at the same port."""
    return _same_port(run, split.first)


@port_fixed.also((WHOLE, SINGLE))
def port_fixed_for_one_process(run: Run, single: Run) -> Said:
    """The same for the run with one process."""
    return _same_port(run, single) if single.trained else ()


def _same_port(run: Run, other: Run) -> Said:
    first, second = _ports(run), _ports(other)
    for port in sorted(first.keys() & second.keys())[:1]:
        yield Seen(f"every run meets at port {port}", first[port])


def _ports(run: Run) -> dict[str, str]:
    """The ports at which a run met, each with the line that named it."""
    found = {str(event.port): "" for event in run.all(StoreOpened) if event.master and event.port}
    for event in run.all(Joining):
        if url := re.search(r"tcp://.*:(\d+)", event.init_method):
            found[url[1]] = event.where
        elif run.launch != "torchrun" and event.port:
            found[event.port] = event.where
    return found


@rule(
    why="A group that is not destroyed can hang or warn at the end.",
    fix="Call torch.distributed.destroy_process_group() on the way out, also after an error (try ... finally).",
    hint=True,
    anywhere=True,
)
def not_destroyed(run: Run) -> Said:
    """No rank destroyed the group. (Lightning leaves a gloo group to the end of the process.)"""
    ranks = run.trained
    kept = all(process.rank is not None and not process.first(GroupDestroyed) for process in ranks)
    if len(ranks) > 1 and kept and not any(process.steps[-1].before.fitting for process in ranks):
        yield Seen("the process group is never destroyed")
