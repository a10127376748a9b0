"""How a run ended: hangs, floods of output, endless loops, crashes, and runs that trained nothing."""

import re
from itertools import islice

from workshop.check.evidence.events import Ended, Exited, Joined, Joining, Raised, WroteOutside
from workshop.check.evidence.run import Process, Run
from workshop.check.rules.collectives import collectives_differ
from workshop.check.rules.processes import address_overwritten, no_group, wrong_group
from workshop.check.rules.rule import Makes, Rule, Said, Seen, rule
from workshop.check.rules.words import named
from workshop.run.failures import is_echo

FLOOD = Seen("it printed more than 20 MB, and the check ended it")


def _ending(why: str, fix: str, after: tuple[Rule, ...] = ()) -> "Makes[[Run]]":
    return rule(why=why, fix=fix, after=after, blocks=True, always=True)


@_ending(
    why="Output by the megabyte hides the lines that matter and fills the disk.",
    fix="Print one line an epoch, on rank 0 only.",
)
def output_flood(run: Run) -> Said:
    """The run printed so much that the check ended it."""
    return [FLOOD] if run.flooded else []


@_ending(
    why="Processes that wait for each other in different calls wait for ever; on a cluster the job uses up its whole time.",
    fix="All ranks must call the same collectives in the same order, and take the same number of steps. Move collectives "
    "(and backward() of a DDP model, which calls them too) out of code that only some ranks reach, such as `if rank == 0`.",
)
def hang(run: Run) -> Said:
    """All processes wait."""
    return [_standing(run)] if run.hung == "idle" else []


@_ending(
    why="The program neither moves on nor ends.",
    fix="Look at the line that is named: the condition that should end the loop never holds, or each turn takes too long.",
)
def endless(run: Run) -> Said:
    """A process computes without taking steps, or the time of the check was over."""
    return [_standing(run)] if run.hung in ("busy", "long") else []


@_ending(
    why="A run that writes outside of its own folder can overwrite somebody's files.",
    fix="Write only below the folder that the run is started in, or to the path that an option names.",
)
def outside_write(run: Run) -> Said:
    """A file outside of the run's folder was to be written."""
    return _outside(run)


@_ending(
    why="The program ended with an error, so nothing after it was done.",
    fix="Read the last line of the error and the line of your program that is named; --verbose shows the traceback.",
    after=(outside_write,),
)
def crash(run: Run) -> Said:
    """An exception, an exit status, or a process that died."""
    seen = None if run.hung or run.flooded else _error(run)
    # Two ranks that write one file take it away from each other: then that is what is wrong.
    if seen and not ("No such file" in seen.text and run.shared_file()):
        yield seen


@_ending(
    why="A run that takes no step has trained nothing, even if it ends without an error.",
    fix="Call optimizer.step() in a loop over the batches, and see that main() is called.",
    after=(address_overwritten, no_group, wrong_group, collectives_differ),
)
def no_training(run: Run) -> Said:
    """The run ended well and took no step."""
    if not run.trained and ending(run) is None:
        yield Seen("the run ended without an error and took no step")


def ending(run: Run) -> Seen | None:
    """How a run ended wrongly; None if it ended well."""
    if run.flooded:
        return FLOOD
    if run.hung:
        return _standing(run)
    return next(iter(_outside(run)), None) or _error(run)


def _outside(run: Run) -> list[Seen]:
    first = islice(run.all(WroteOutside), 1)
    return [Seen(f"it writes to {event.path}, outside of the folder that it runs in", event.where) for event in first]


def _standing(run: Run) -> Seen:
    """Which rank is where in a run that hung."""
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
        parts.append(f"they took {' and '.join(counts)} steps")
    if alive and all(process.first(Joining) and not process.first(Joined) for process in alive):
        asked = {f"world size {each.world_size}, port {each.port}" for process in alive for each in process.of(Joining)}
        parts.append(f"they never became one group: they asked for {'; '.join(sorted(asked))}")
    detail = "\n".join(f"rank {process.rank}:\n{process.stack[:3000]}" for process in alive)
    long = f"it had not ended after {run.seconds:.0f} s; "
    lead = {"idle": "it hangs: ", "busy": "it computes, but takes no step: ", "long": long}[run.hung]
    return Seen(lead + "; ".join(parts), where, detail)


def _position(stack: str) -> tuple[str, str]:
    """Where a process is: the line of the program, and the call that it is in."""
    call = ""
    for path, number, function in re.findall(r'^\s*File "(.+)", line (\d+) in (.+)', stack, re.MULTILINE):
        if "/workshop/check/" in path:
            continue
        if not re.search(r"^<|/(site-packages|torch|lib/python\d)", path):
            return f"{path.rsplit('/', 1)[-1]}:{number}", call
        # The outermost call into a library that has a name of its own: what the program called.
        call = function if function not in ("wrapper", "_fn", "__call__", "_call_impl") else call or function
    return "", call


# What a message says, and what it means.
EXPLAINED = {
    "Weights only load failed": "torch.load(weights_only=True) refuses this file: save only tensors, numbers, lists and dicts",
    "mark a variable ready only once": "a parameter is used twice in one backward (checkpointing, or two forwards)",
    "finished reduction in": "DDP waits for gradients of unused parameters: use them, or set find_unused_parameters=True",
    "initialize the default process group twice": "init_process_group is called a second time in the same process",
    "Address already in use|EADDRINUSE": "the port is taken, by this program itself or by another one",
    "device_ids and output_device": "on the CPU, DDP takes no device_ids",
    "Default process group has not been initialized": "a collective is called before init_process_group",
    "invalid device ordinal": "there is no device with this number on this machine",
    "[Nn]o NVIDIA driver|not compiled with CUDA": "there is no CUDA device here; torch.accelerator names the one that there is",
    "NCCL": "the backend nccl needs GPUs; get_default_backend_for_device chooses the right one",
    "writing outside of the run's folder": "the check lets nothing be written outside of the run's folder",
}


def _error(run: Run) -> Seen | None:
    """What ended the run with an error."""
    if found := run.first_exception():
        process, event = found
        if is_echo(event.message):
            return Seen(_lost(run, process, event), event.where, event.traceback)
        who = f"{named(process)}: " if process.rank is not None and run.nproc > 1 else ""
        message = event.message[:300] + ("..." if len(event.message) > 300 else "")
        meaning = next((f" ({text})" for sign, text in EXPLAINED.items() if re.search(sign, event.message)), "")
        return Seen(f"{who}{event.type}: {message}{meaning}", event.where, event.traceback)
    for process in run.processes:
        for exited in process.of(Exited):
            if exited.status != 0:
                return Seen(f"it ends with exit status {exited.status}{_last_line(process)}")
    if run.status in (0, None):
        return None
    silent = next((process for process in run.processes if not process.first(Ended)), None)
    who, line = (named(silent), _last_line(silent)) if silent else ("a process", "")
    return Seen(f"{who} died without a traceback (status {run.status}){line}")


def _lost(run: Run, process: Process, event: Raised) -> str:
    """What a library means by "connection reset by peer": another rank has gone."""
    failed = next(seconds for seconds, each in process.timed(Raised) if each is event)
    others = [each for each in run.ranks if each is not process]
    gone = [named(each) for each in others if any(seconds < failed for seconds, _ in each.timed(Ended))]
    who = f"{' and '.join(gone)}, which had already ended" if gone else "another rank, which ended or died"
    return f"{named(process)} lost its connection to {who} ({event.type})"


def _last_line(process: Process) -> str:
    lines = process.stderr.strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""
