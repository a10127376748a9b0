"""How a run ended: hangs, floods of output, endless loops, crashes, and runs that trained nothing."""

import re
from dataclasses import replace
from itertools import islice
from typing import Any

from workshop.check.evidence.events import (
    Ended,
    Exited,
    GroupDestroyed,
    Joined,
    Joining,
    Loaded,
    Raised,
    Stopped,
    VariableSet,
    Wrapped,
    WroteOutside,
)
from workshop.check.evidence.misuses import MemoryShared, PythonStarted
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.rules.collectives import collectives_differ, lost_collectives, never_awaited
from workshop.check.rules.divergence import Divergence, first_divergence
from workshop.check.rules.parting import parting
from workshop.check.rules.processes import address_overwritten, no_group, wrong_group
from workshop.check.rules.rule import Makes, NotJudged, Rule, Said, Seen, rule
from workshop.check.rules.walk import path_of_their_own
from workshop.check.rules.words import listed, named, plural
from workshop.run.failures import is_echo

WANTED = re.compile(r"\b([2-9]|[1-9]\d+)\+? (?:\w+ ){0,2}GPUs?\b", re.IGNORECASE)
# What only a real GPU can do: pretended ones refuse it, and the CPU has no such operation for a type.
WITHOUT_GPU = re.compile(r"^Pretended GPUs cannot|^\"\w+_cpu\w*\" not implemented for |^0 active drivers")  # of Triton
# It has no GPU, or another program uses the port.
OF_MACHINE = re.compile(
    "[Nn]o NVIDIA driver|not compiled with CUDA|no GPUs found|NCCL built in|ddress already in use|EADDRINUSE"
)
FLOOD = Seen("the program printed more than 20 MB, and the check ended it")


def _ending(why: str, fix: str, after: tuple[Rule, ...] = (), **settings: Any) -> "Makes[[Run]]":
    return rule(why=why, fix=fix, after=after, blocks=True, always=True, **settings)


@_ending(
    why="Megabytes of output hide the important lines and fill the disk.",
    fix="Print one line per epoch, on rank 0 only.",
)
def output_flood(run: Run) -> Said:
    """The run printed so much that the check ended it."""
    return [FLOOD] if run.flooded else []


@_ending(
    why="Processes that wait for each other in different calls never continue; on a cluster the job runs until its time limit.",
    fix="All ranks must call the same collectives in the same order, and take the same number of steps. Move collectives "
    "(and backward() of a DDP model, which calls all-reduce) out of code that only some ranks reach, such as `if rank == 0`.",
    after=(address_overwritten,),
)
def hang(run: Run) -> Said:
    """All processes wait, and none continues."""
    if run.hung != "idle" or _unexplained(run):
        return []
    standing = _standing(run)
    for event in lost_collectives(run)[:1]:
        seen = (
            f"{standing.text}; before that, the program does not wait for {event.name}(async_op=True) at {event.where}"
        )
        return [replace(standing, text=seen, where=event.where, fix=never_awaited.fix, origin="here")]
    return [standing]


@_ending(
    why="The program neither trains nor ends, so on a cluster the job runs until its time limit.",
    fix="Step through the named line with pdb: the condition that ends the loop never becomes true, or an iteration is too slow.",
)
def endless(run: Run) -> Said:
    """A process computes without taking steps, or the run exceeds the time limit of the check."""
    if run.hung in ("busy", "long") and not _of_other_programs(run):
        if not _slow(run):
            yield from () if _unexplained(run) else (_standing(run),)
        elif run.trained:
            yield NotJudged(
                f"what the program does after {plural(len(run.trained[0].steps), 'step')}: the next takes too long"
            )


def _slow(run: Run) -> bool:
    """Whether the processes compute in calls of libraries, but for so long that none takes a step."""
    calls = [_position(process.stack) for process in run.processes if process.stack]
    begun = run.trained and run.asked is not None  # the step of an exercise is quick
    return run.hung == "busy" and not begun and bool(calls) and all(place and call for place, call in calls)


def _of_other_programs(run: Run) -> str:
    """The line at which the program starts other programs, or waits for them; "" if it trains itself."""
    if run.trained or any(process.backwards for process in run.processes):
        return ""
    for process in run.processes:
        if re.search(r'File ".*/subprocess\.py", line \d+ in (_?wait|communicate)', process.stack):
            return _position(process.stack)[0]
    started = () if run.first_exception() else run.all(PythonStarted)
    return next((event.where for event in started), "")


@_ending(
    why="A run that writes outside its own folder can overwrite your other files, or those of other users.",
    fix="Write only below Path.cwd(), the folder in which the run starts, or to a path that you pass as an option.",
    unjudged=True,
)
def outside_write(run: Run) -> Said:
    """The program tried to write a file outside the folder of the run."""
    return _outside(run)


@_ending(
    why="The program ended with an error before it was finished.",
    fix="Read the last line of the traceback, which --verbose shows, and the named line of your program.",
    after=(outside_write, address_overwritten),
)
def crash(run: Run) -> Said:
    """The run ended with an exception or an exit status, or a process died."""
    seen = None if run.hung or run.flooded else _error(run)
    # Ranks that rename the same file make each other fail; then two-writers names the cause. If a rank only lost its connection
    # because another one had made different calls, collectives-differ names the cause.
    explained = seen and (("No such file" in seen.text and run.shared_files()) or (run.ended_by_echo and _parted(run)))
    if seen and not (explained or _needs_something_else(run) or _unexplained(run)):
        yield seen


@_ending(
    why="The cause can be the program, or the way in which the check starts it, for example without a GPU and in a copy of its "
    "folder. Neither a difference between the ranks nor the message shows which.",
    fix="Start the program with two processes without the check: with torchrun, or as it starts its own. If it ends in the same "
    "way, correct this first; otherwise please report it.",
    after=(outside_write, address_overwritten, collectives_differ),
    unjudged=True,
)
def ended_early(run: Run) -> Said:
    """A program that is no exercise failed or hung, and nothing shows that the cause is its own."""
    seen = None if _needs_something_else(run) or _slow(run) else _unexplained(run)
    return [seen] if seen else []


def _needs_something_else(run: Run) -> bool:
    """Whether it ended because it needs more GPUs, or a real one, or only starts other programs; no_training says so."""
    return bool(_wanted_gpus(run) or _needs_gpu(run) or _of_other_programs(run))


def _unexplained(run: Run) -> Seen | None:
    """How a program that is no exercise failed or hung, if neither a difference between its ranks nor the message explains it."""
    if run.asked or run.flooded or any(run.all(WroteOutside)):
        return None
    if run.hung:
        apart = len({_position(process.stack)[0] for process in run.ranks if process.stack}) > 1
        proof = run.hung == "idle" and (apart or _difference(run) or lost_collectives(run))
        return None if proof else _standing(run)
    if path_of_their_own(run):
        return None
    if found := run.first_exception():
        process, event = found
        echo = is_echo(event.message, event.type)
        parted = _difference(run) is not None if echo else _of_one_rank(run, process, event)
        of_processes = _explanation(event) and not OF_MACHINE.search(event.message)
        return None if parted or of_processes else _error(run)
    exited = any(event.status for event in run.all(Exited))
    return None if not exited and run.status and _difference(run) else _error(run)


def _difference(run: Run) -> Seen | Divergence | None:
    """The first difference between the calls of two ranks."""
    return parting(run) or first_divergence(run)


def _of_one_rank(run: Run, process: Process, event: Raised) -> bool:
    """Whether another rank passed the line at which one has failed: it ended well, took more steps, or lost its connection."""
    others = [each for each in run.ranks if each is not process]
    alike = [each for each in others if any(other.type == event.type for other in each.of(Raised))]
    return any(
        bool(each.first(Raised) or each.first(Ended)) or len(each.steps) > len(process.steps)
        for each in others
        if each not in alike
    )


@_ending(
    why="Without a step nothing was trained, and there is nothing that the check can judge.",
    fix="Call optimizer.step() in a loop over the batches, and make sure that main() is called.",
    after=(address_overwritten, no_group, wrong_group, collectives_differ),
    unjudged=True,
)
def no_training(run: Run) -> Said:
    """The run ended without an error, but took no step, or its processes train in a way that the check does not know."""
    if (shared := next(run.all(MemoryShared), None)) and all(process.rank is None for process in run.processes):
        seen = "the processes have their parameters in shared memory and form no process group (Hogwild)"
        fix = "The check judges only programs whose processes form a group, and programs of one process."
        yield Seen(seen, shared.where, fix=fix)
    elif where := _of_other_programs(run):
        seen = "the program only starts other programs and waits for them; the check does not see what these do"
        fix = "After --, write the command that starts the training itself, for example torchrun train.py."
        yield Seen(seen, where, fix=fix)
    elif wanted := _wanted_gpus(run):
        number, event = wanted
        seen = f"the program ends before the training, because it wants {number} GPUs: {event.message[:200]}"
        fix = f"Start it with a launcher that says so, for example torchrun --nproc-per-node={number} train.py."
        yield Seen(seen, event.where, fix=fix)
    elif needs := _needs_gpu(run):
        seen = f"the check cannot run this program without a real GPU: {needs.message[:200]}"
        yield Seen(seen, needs.where, fix="Check it on a machine with GPUs: `workshop check` uses them.")
    elif _slow(run) and not run.trained:
        standing = _standing(run)
        text = f"{standing.text}; the check ended it after {run.seconds:.0f} s"
        fix = "Make the model, the batches or the data smaller, with options of the program for example, and check it again."
        yield replace(standing, text=text, fix=fix)
    elif not run.trained and ending(run) is None:
        path = next((event.path for event in run.all(Loaded) if event.path), "")
        why = f": it resumes from {path.rsplit('/', 1)[-1]}, which may be from a finished run" if path else ""
        if backwards := next((process.backwards for process in run.ranks if process.backwards), []):
            why = f": it called backward() {plural(len(backwards), 'time')}, but no optimizer of torch took a step after that"
        where = run.where(Loaded) or (backwards[-1].where if backwards else "")
        yield Seen(f"the run ended without an error, but took no step{why}", where)
    elif run.cut and run.asked is None:
        step = max((event.steps for event in run.all(Stopped)), default=len(run.trained[0].steps) if run.trained else 0)
        later = f"to let it take more steps, pass --steps {10 * step}, for example"
        yield NotJudged(f"what the program does after step {step}, where the check ended it; {later}", goal=False)


def _wanted_gpus(run: Run) -> tuple[str, Raised] | None:
    """The number of GPUs that a program demands before it trains, if it starts its processes itself, and its exception."""
    found = run.first_exception()
    if run.asked or run.launch != "spawn" or any(process.steps for process in run.processes) or not found:
        return None
    number = WANTED.search(found[1].message)
    return (number[1], found[1]) if number else None


def _needs_gpu(run: Run) -> Raised | None:
    """What only a real GPU can do, if this has ended the run of a program that is no exercise."""
    found = run.first_exception()
    return found[1] if found and run.failed and not run.asked and WITHOUT_GPU.search(found[1].message) else None


def _parted(run: Run) -> bool:
    return any(collectives_differ.detectors[0].function(run))


def ending(run: Run) -> Seen | None:
    """Return what is wrong with the end of a run, or None if it ended well."""
    if run.flooded:
        return FLOOD
    if run.hung:
        return _standing(run)
    return next(iter(_outside(run)), None) or _error(run)


def _outside(run: Run) -> list[Seen]:
    first = islice(run.all(WroteOutside), 1)
    return [Seen(f"it writes to {event.path}, outside the folder in which it runs", event.where) for event in first]


def _standing(run: Run) -> Seen:
    """Say in which line each rank is, for a run that hung."""
    alive = [process for process in run.processes if process.stack]
    alive = [process for process in alive if process.rank is not None] or alive
    parts, where, verb = [], "", "is" if run.hung == "busy" else "waits"
    for number, process in enumerate(alive):
        place, call = _position(process.stack)
        where = where or place
        name = named(process, f"process {number}")
        parts.append(f"{name} {verb} in {call or 'its own code'} at {place or 'an unknown line'}")
    parts += [f"{named(process)} has ended" for process in run.ranks if process.rank is not None and not process.stack]
    counts = [str(len(process.steps)) for process in run.trained]
    if len(set(counts)) > 1:
        parts.append(f"the ranks took {' and '.join(counts)} steps")
    joining = [process for process in alive if process.first(Joining)]
    if joining and not any(process.first(Joined) for process in joining):
        asked = {
            f"world size {each.world_size}, port {each.port}" for process in joining for each in process.of(Joining)
        }
        parts = [f"the processes do not form one group: they ask for {' and for '.join(sorted(asked))}", *parts]
        ports = {each.port for process in joining for each in process.of(Joining)}
        set_here = [each.where for process in joining for each in process.of(VariableSet) if each.name == "MASTER_PORT"]
        where = set_here[0] if len(ports) > 1 and set_here else joining[0].of(Joining)[0].where
    detail = "\n".join(f"rank {process.rank}:\n{process.stack[:3000]}" for process in alive)
    fix = origin = ""
    cause = parting(run) if run.hung == "idle" else None
    if cause:
        parts, where, fix, origin = [cause.text, *parts], cause.where, cause.fix, cause.origin
    elif run.hung == "idle" and (found := first_divergence(run)):
        parts, where = [found.text, *parts], found.where
    long = f"the program had not ended after {run.seconds:.0f} s; "
    lead = {"idle": "the program hangs: ", "busy": "the program computes, but takes no step: ", "long": long}[run.hung]
    return Seen(lead + "; ".join(parts), where, detail, fix, origin)


def _position(stack: str) -> tuple[str, str]:
    """Return the line of the program in which a process is, and the library call that it waits in."""
    call = ""
    for path, number, function in re.findall(r'^\s*File "(.+)", line (\d+) in (.+)', stack, re.MULTILINE):
        if re.search(r"/workshop/(check/|pretend/|gloo\.py)", path):
            continue
        if not re.search(r"^<|/(site-packages|torch|lib/python\d)", path):
            return f"{path.rsplit('/', 1)[-1]}:{number}", call
        # The outermost named call into a library is the one that the program made.
        call = function if function not in ("wrapper", "_fn", "__call__", "_call_impl") else call or function
    return "", call


# For the message of a library, given as a regular expression: what it means, and what to do.
EXPLAINED = {
    "Weights only load failed": "the file contains an object of a type that the message names: save only tensors, lists, dicts "
    "and numbers of Python (not those of NumPy)",
    "mark a variable ready only once": "DDP got a gradient twice: use one forward per backward, and use_reentrant=False",
    "'(DistributedDataParallel|FullyShardedDataParallel)' object has no attribute": "the wrapper hides the methods and "
    "attributes of the model: use those of model.module",
    "finished reduction in|not used in producing the loss": "the loss does not use all parameters: use all outputs, or give DDP "
    "find_unused_parameters=True",
    "process group twice": "init_process_group is called a second time in the same process: call it only once",
    "Default process group has not been initialized": "a collective is called before init_process_group: call that first",
    "Address already in use|EADDRINUSE": "the port is in use: let torchrun --standalone or a TCPStore with port 0 choose one",
    "device_ids and output_device": "device_ids do not match the device of the model: call DDP(model) without them",
    "invalid device ordinal": "this machine has no device with this number: choose the device by LOCAL_RANK, one process per GPU",
    "[Nn]o NVIDIA driver|not compiled with CUDA": "no CUDA device here: use torch.accelerator.current_accelerator()",
    "no GPUs found|NCCL built in|No backend type": "unsuitable backend: use dist.get_default_backend_for_device(device)",
    "Duplicate GPU detected": "two ranks use the same GPU: choose the device by LOCAL_RANK before the first collective",
    "waiting for clients": "some processes did not join the group: start all, with the same MASTER_ADDR and WORLD_SIZE",
    "operation timeout|Timed out waiting": "a collective timed out because not all ranks called it: all must make the same calls",
    "unhandled system error": "NCCL failed, for example in the network or shared memory: NCCL_DEBUG=INFO prints the cause",
    "device-side assert triggered": "a kernel got an invalid value, such as a label out of range: run on the CPU to see it",
    "(CUDA|HIP) out of memory": "the GPU memory is full: reduce the batch size, or use activation checkpointing or fully_shard",
    "no kernel image is available": "this build of PyTorch has no code for this GPU: install a build for its architecture",
    "bootstrapping phase": "each process that spawn starts runs the top level of the file again: call mp.spawn() under "
    'if __name__ == "__main__"',
    "when the top level runs again$": "each process that spawn starts runs the top level of the file again, and it fails there: "
    'move this statement under if __name__ == "__main__"',
    "^Can't (pickle|get) (local object|attribute)|^cannot pickle|^Can't pickle": "what goes to another process, or into a file, "
    "is pickled: use functions and classes at the top level of a module, and no lambdas, inner functions or open files",
    "is not defined in a process that spawn": "it has no value here: each process that spawn starts runs the top level "
    'of the file again, but not the code under if __name__ == "__main__". Pass it to the spawned function, or define it above',
    "outside of the run's folder": "the check does not allow writing outside the folder of the run: write below it",
}


# What caused an exception that Lightning raises after a method of the program has returned.
CAUSES = {
    "does not require grad|backward through the graph a second time": "returned:training_step",
    "[Ee]arly ?[Ss]topping": "call:EarlyStopping",
    "ModelCheckpoint|monitor": "call:ModelCheckpoint",
    "has no logger|without a logger|logger=False": "call:Trainer.logger|Trainer",
}


def _error(run: Run) -> Seen | None:
    """The error that ended the run; the message of the library is in the detail."""
    if own := path_of_their_own(run):
        return own
    if found := run.first_exception():
        process, event = found
        who = f"{named(process)}: " if process.rank is not None and run.nproc > 1 else ""
        plain = _explanation(event)
        if "before init_process_group" in plain and (ended := process.first(GroupDestroyed)):
            plain = f"a collective is called after the process group has been destroyed at {ended.where}: do that last"
        gone = _gone(run, process, event)
        echo = is_echo(event.message, event.type)
        first = _difference(run) if echo else None
        if echo and (gone or not plain or first):
            lost = _lost(process, event, gone)
            if first:
                return replace(_because(lost, first), detail=event.traceback)
            return Seen(f"{lost}: find out why {gone or 'that rank'} ended", event.where, event.traceback)
        if plain:
            names = _unused(process, event)
            owner = [part for part in names[0].split(".")[:-1] if not part.isdigit()] if names else []
            origin = f"member:{owner[-1] if owner else names[0]}" if names else ""
            if undefined := re.match(r"name '(\w+)' is not defined in", event.message):
                plain, origin = plain.replace("it", undefined[1], 1), rf"text:^\s+{undefined[1]}\b.*="
            of = f"; it does not use {listed(names)}" if names else ""
            return Seen(f"{who}{plain}{of} ({event.type})", event.where, event.traceback, origin=origin)
        message = _last_cause(event.message)
        message = message[:300] + ("..." if len(message) > 300 else "")
        origin = next((kind for sign, kind in CAUSES.items() if re.search(sign, event.message)), "")
        return Seen(f"{who}{event.type}: {message}", event.where, event.traceback, origin=origin)
    for process in run.processes:
        for exited in process.of(Exited):
            if exited.status != 0:
                return Seen(f"the program ends with exit status {exited.status}{_last_line(process)}")
    if run.status in (0, None):
        return None
    silent = next((process for process in run.processes if not process.first(Ended)), None)
    who, line = (named(silent), _last_line(silent)) if silent else ("a process", "")
    died = f"{who} died without a traceback (status {run.status}){line}"
    first = _difference(run)  # gloo ends a process that gets a message of a different size
    return _because(died, first) if first else Seen(died)


def _explanation(event: Raised) -> str:
    """What the message of an exception means, in plain words; "": it is not one of a library for several processes."""
    return next((text for sign, text in EXPLAINED.items() if re.search(sign, event.message)), "")


def _because(seen: str, first: Seen | Divergence) -> Seen:
    """What was seen, with the first difference between the calls of two ranks as its cause."""
    more = (first.fix, first.origin) if isinstance(first, Seen) else ()
    return Seen(f"{seen}; {first.text}", first.where, "", *more)


def _last_cause(message: str) -> str:
    """Of "Caught TypeError in DataLoader worker process 0" and a traceback, the exception in the worker."""
    inner = re.findall(r"\w+(?:Error|Exception): .*?(?=\s(?:Traceback|\(RANK \d)|\s*$)", message, re.DOTALL)
    if "Traceback (most recent call last)" in message and "Original Traceback" not in message and inner:
        return str(
            inner[-1]
        )  # of "CheckpointException ranks:dict_keys([0, 1]) Traceback ...", the exception of the last rank
    lines = message.strip().splitlines()
    return f"{lines[0]} {lines[-1].strip()}" if "Original Traceback" in message and len(lines) > 2 else message


def _unused(process: Process, event: Raised) -> list[str]:
    """The names of the parameters without a gradient that DistributedDataParallel counts in its message."""
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", event.message)
    numbers = [int(number) for number in found[1].split()] if found else []
    wrapped = [each.names for each in process.of(Wrapped) if numbers and max(numbers) < len(each.names)]
    return [wrapped[0][number] for number in numbers] if len(wrapped) == 1 else []


def _gone(run: Run, process: Process, event: Raised) -> str:
    """The other ranks that had ended when an exception was raised."""
    failed = next(seconds for seconds, each in process.timed(Raised) if each is event)
    others = [each for each in run.ranks if each is not process]
    return " and ".join(named(each) for each in others if any(seconds < failed for seconds, _ in each.timed(Ended)))


def _lost(process: Process, event: Raised, gone: str) -> str:
    """What a library means by "connection reset by peer": another rank has ended."""
    who = f"{gone}, which had already ended" if gone else "another rank, which ended or died"
    return f"{named(process)} lost its connection to {who} ({event.type})"


def _last_line(process: Process) -> str:
    lines = process.stderr.strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""
