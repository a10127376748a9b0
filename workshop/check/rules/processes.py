"""Processes, the group that they join, and the device that each uses."""

import itertools
import re
from itertools import islice

from workshop.check.evidence.events import (
    AcceleratorCalled,
    Backward,
    DeviceChosen,
    GpuMemory,
    GpuNoted,
    GroupDestroyed,
    Joined,
    Joining,
    Started,
    StoreOpened,
    TrainerFit,
)
from workshop.check.evidence.misuses import MemoryShared, PythonStarted, RankGiven
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.rules.words import named, plural
from workshop.check.scenarios import DEVICES, SINGLE, SPLIT, TWO_NODES, WHOLE, Split

LOCAL = ("127.0.0.1", "localhost", "::1")
# A process that spawn starts fails before it calls the function of the program.
NOT_SPAWNED = re.compile(
    "bootstrapping phase|^Can't (pickle|get)|^cannot pickle|in a process that spawn has started$|runs again$"
)


@rule(
    why="torchrun sets the address at which its processes find each other; with a different address they do not.",
    fix="Do not set MASTER_ADDR or MASTER_PORT; call init_process_group without an address, so it uses that of torchrun.",
    blocks=True,
    anywhere=True,
    origin="environ:MASTER_",
)
def address_overwritten(run: Run) -> Said:
    """The program changed the address that torchrun had set."""
    for event in run.all(Joining) if run.launch == "torchrun" else ():
        port = ("MASTER_PORT", event.given_port, event.port)
        address = ("MASTER_ADDR", event.given_address, event.address)
        for name, given, used in (port, address):
            if given and used != given:
                there = ", which is wrong on a second machine" if used in LOCAL else ""
                yield Seen(f"{name} was {given} and is {used} at init_process_group{there}", event.where)
                return


@rule(
    why="Processes that do not join one group train separate models.",
    fix="Call torch.distributed.init_process_group in every process, with its rank and the number of processes.",
    blocks=True,
    anywhere=True,
    origin="call:init_process_group text:^export",
)
def no_group(run: Run) -> Said:
    """No process joined a group."""
    if run.nproc == 1 or any(process.rank is not None for process in run.processes) or any(run.all(MemoryShared)):
        return
    found = run.first_exception()
    lightnings = found is not None and "/lightning/" in found[1].traceback  # Lightning explains what it refuses
    unstarted = found is not None and NOT_SPAWNED.search(found[1].message)
    if run.failed and (run.asked is None or run.hung or run.flooded or lightnings or unstarted):
        return  # the error or hang explains more
    trained = [process for process in run.processes if process.first(Backward)]
    joining = any(run.all(Joining))  # a join that failed or hangs: other rules report it
    if len(trained) > 1:
        yield Seen(f"{len(trained)} processes train, and none has joined a process group")
    elif trained and not joining:
        yield Seen("one process trains without a process group", trained[0].data_where)
    elif not joining and not any(run.all(PythonStarted)):  # no_training says that it only starts other programs
        yield Seen("no process has joined a process group")


@rule(
    why="The group must contain all processes that were started, each with its own rank.",
    fix="Pass rank and world_size (the number of all processes) to init_process_group; under torchrun omit both.",
    blocks=True,
    anywhere=True,
    origin=r"call:Trainer.devices|Trainer text:\bRANK=",
)
def wrong_group(run: Run) -> Said:
    """The group has the wrong size, or its ranks are not those of the launcher."""
    joined = [process for process in (run.processes if run.asked else run.ranks) if process.rank is not None]
    if run.nproc == 1 or not joined:
        return
    groups = [process.of(Joined)[-1] for process in joined]
    where, sizes = groups[0].where, {group.world_size for group in groups}
    if len(joined) > run.nproc:
        parents = {event.parent for process in joined for event in process.of(Started)}
        by = sum(process.pid in parents for process in run.processes) if run.launch == "torchrun" else 0
        more = f"; {plural(by, 'process')} of torchrun started the others" if by else ""
        yield Seen(f"{len(joined)} processes joined a group, but {run.nproc} were started{more}", where)
    elif sizes != {run.nproc}:
        yield Seen(f"the group has {plural(min(sizes), 'process')}, but {run.nproc} were started", where)
    elif run.launch == "torchrun":
        for process in joined:
            started = process.first(Started)
            if started and started.rank is not None and int(started.rank) != process.rank:
                text = f"the process that torchrun calls rank {started.rank} has joined as rank {process.rank}"
                yield Seen(text, where)
                return


@rule(
    why="The ranks count over all machines. On a second machine, two processes ask for the same rank, so the group never forms.",
    fix="Leave out rank= and world_size=: init_process_group() reads RANK and WORLD_SIZE, which torchrun sets.",
    runs=TWO_NODES,
    needs=(RankGiven,),
    anywhere=True,
    mild=True,  # a program for one node needs no other rank
)
def rank_of_node(run: Run) -> Said:
    """On two machines, a process gives ``init_process_group`` its rank on its own machine."""
    for started, given in of_one_node(run)[:1]:
        seen = (
            f"on the second of two machines, rank {started.rank} gives init_process_group() its local rank {given.rank}"
        )
        yield Seen(seen, given.where, origin="here")


def of_one_node(run: Run) -> list[tuple[Started, RankGiven]]:
    """The processes that join with their local ranks, although these are not their ranks."""
    pairs = itertools.chain.from_iterable(
        itertools.product(process.of(Started), process.of(RankGiven)) for process in run.processes
    )
    return [(started, given) for started, given in pairs if started.local_rank == str(given.rank) != started.rank]


@rule(
    why="Ranks count over all machines, but device numbers begin at 0 on each machine, so this fails on a second machine.",
    fix="Choose the device by LOCAL_RANK: torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK'])).",
    runs=TWO_NODES,
    anywhere=True,
    origin=r"numbered:environ(?!(\.get\(|\[)'LOCAL_RANK)|get_rank|(device\(|cuda:\{).*\brank\b text:LOCAL_RANK=",
)
def device_index(run: Run) -> Said:
    """On two machines a process does not use the device with its local rank."""
    for process in run.processes:
        if any(started.local_rank and int(started.local_rank) in memory.bytes
               for started, memory in itertools.product(process.of(Started), process.of(GpuMemory))):  # fmt: skip
            continue  # the process sees only its own GPU
        for started, event in itertools.product(process.of(Started), process.of(DeviceChosen)):
            if event.where and started.local_rank is not None and event.index not in (None, int(started.local_rank)):
                who = f"rank {started.rank} (local rank {started.local_rank})"
                machines = f"on two machines of {run.nproc // 2} devices"
                yield Seen(f"{machines}, {who} asks for device {event.index}", event.where)
                return
    used = {gpu for event in run.all(GpuMemory) for gpu in event.bytes}
    by_library = run.asked is None and any(run.all(TrainerFit))
    chosen = any(run.all(DeviceChosen)) or any(run.all(AcceleratorCalled)) or by_library
    noted = {event.kind for event in run.all(GpuNoted)}
    unclear = run.hung or "no-such-gpu" in noted or (run.failed and not noted)  # it may have failed before it chooses
    if not chosen and not unclear and len(used) < 2:
        # A hint: the program may not have been made for more than one device per machine, or not for GPUs.
        yield Seen("with two devices per machine, no process chooses one: all use the first, or the CPU", mild=True)


@rule(
    why="Processes that share a GPU compute in turn and share its memory; NCCL refuses two ranks on one GPU.",
    fix="In each process, call torch.accelerator.set_device_index(local_rank) before you create the first tensor.",
    runs=DEVICES,
    after=(no_group, wrong_group),
)
def device_shared(run: Run) -> Said:
    """On a machine with one device per process, two processes use the same device."""
    never = "" if any(run.all(DeviceChosen)) else ", because no line chooses one"
    for refused in [event for event in run.all(GpuNoted) if event.kind == "same-gpu"][:1]:
        where = run.where(DeviceChosen) or run.where(Joined) or refused.where
        yield Seen(f"two processes use the same GPU{never}, and NCCL refuses it: {refused.detail}", where)
        return
    if run.failed:
        from workshop.pretend.installation import unsupported  # imports torch, which `workshop hint` does not need

        reason = unsupported() or "the program fails where devices are only pretended"
        yield NotJudged(f"which device each process uses ({reason})")
        return
    used: dict[tuple[int, int], Process] = {}
    for process in run.ranks:
        where = next((event.where for event in process.of(Joined)), "")
        index = 0  # the device of a process that chooses none
        for event in process.of(DeviceChosen):
            index, where = (index, where) if event.index is None else (event.index, event.where)
        memory = [event.bytes for event in process.of(GpuMemory)][-1:]
        if memory == [{}]:
            continue  # it trains on the CPU
        for each in memory:  # where its tensors are says more than the device that it chose
            index = max(each, key=each.__getitem__)
        place = (_node(process), index)
        if place in used:
            both = f"{named(used[place])} and {named(process)} both use device {index}"
            yield Seen(f"on a machine with one device per process, {both}{never}", where)
            return
        used[place] = process


def _node(process: Process) -> int:
    """The number of the first rank on the node of a process."""
    started = process.first(Started)
    return int(started.rank) - int(started.local_rank) if started and started.rank and started.local_rank else 0


@rule(
    why="gloo copies the tensors of GPUs to the CPU and back; NCCL communicates between the GPUs directly, many times as fast.",
    fix="Let torch choose: init_process_group(dist.get_default_backend_for_device(device), ...), or no backend at all.",
    runs=DEVICES,
    after=(no_group, wrong_group),
    origin="holds:gloo",
)
def backend_fixed(run: Run) -> Said:
    """On a machine with GPUs the group uses gloo."""
    for event in islice((each for each in run.all(Joining) if each.backend == "gloo"), 1):
        yield Seen(f"on a machine with {run.nproc} devices, the group still uses gloo", event.where)


backend_fixed.also(TWO_NODES)(backend_fixed.detectors[0].function)


@rule(
    why="Two runs on the same machine cannot use the same port.",
    fix="Let the system choose a free port: a TCPStore with port 0, or torchrun, which chooses one.",
    runs=(WHOLE, SPLIT),
    origin="text:^[^#]*(MASTER_PORT=|port=)",
)
def port_fixed(run: Run, split: Split) -> Said:
    """Two runs use the same port."""
    return _same_port(run, split.first)


@port_fixed.also((WHOLE, SINGLE))
def port_fixed_for_one_process(run: Run, single: Run) -> Said:
    """The same for the run with one process."""
    return _same_port(run, single) if single.trained else ()


def _same_port(run: Run, other: Run) -> Said:
    first, second = _ports(run), _ports(other)
    for port in sorted(first.keys() & second.keys())[:1]:
        yield Seen(f"every run uses port {port}", first[port])


def _ports(run: Run) -> dict[str, str]:
    """The ports that a run used, each with the line that gave it."""
    found = {str(event.port): "" for event in run.all(StoreOpened) if event.master and event.port}
    for event in run.all(Joining):
        if url := re.search(r"tcp://.*:(\d+)", event.init_method):
            found[url[1]] = event.where
        elif run.launch != "torchrun" and event.port:
            found[event.port] = event.where
    return found


@rule(
    why="A process group that is not destroyed can cause a hang or a warning at exit.",
    fix="Call torch.distributed.destroy_process_group() before the program ends, also after an error (try ... finally).",
    hint=True,
    anywhere=True,
    origin="call:init_process_group",
)
def not_destroyed(run: Run) -> Said:
    """No rank destroyed the group. (Lightning does not destroy a gloo group before the process ends.)"""
    ranks = run.trained
    kept = all(process.rank is not None and not process.first(GroupDestroyed) for process in ranks)
    if len(ranks) > 1 and kept and not run.cut and not any(process.steps[-1].before.fitting for process in ranks):
        yield Seen("the process group is never destroyed")
