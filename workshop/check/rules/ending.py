"""How a run ended: hangs, floods of output, endless loops, crashes, and runs that trained nothing."""

import re

from workshop.check.evidence.events import Ended, Exited, Joined, Joining, Raised, WroteOutside
from workshop.check.evidence.run import Process, Run
from workshop.check.rules.collectives import collectives_differ
from workshop.check.rules.processes import address_overwritten, no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.scenarios import WHOLE


@rule(
    why="Output by the megabyte hides the lines that matter and fills the disk.",
    fix="Print one line an epoch, on rank 0 only.",
    runs=WHOLE,
    blocks=True,
    always=True,
)
def output_flood(run: Run) -> Said:
    """The run printed so much that the check ended it."""
    if run.flooded:
        yield _flood()


@rule(
    why="Processes that wait for each other in different calls wait for ever; on a cluster the job uses up its whole time.",
    fix="All ranks must call the same collectives in the same order, and take the same number of steps. Move collectives "
    "(and backward() of a DDP model, which calls them too) out of code that only some ranks reach, such as `if rank == 0`.",
    runs=WHOLE,
    blocks=True,
    always=True,
)
def hang(run: Run) -> Said:
    """All processes wait."""
    if run.hung == "idle":
        yield _standing(run)


@rule(
    why="The program neither moves on nor ends.",
    fix="Look at the line that is named: the condition that should end the loop never holds, or each turn takes too long.",
    runs=WHOLE,
    blocks=True,
    always=True,
)
def endless(run: Run) -> Said:
    """A process computes without taking steps, or the time of the check was over."""
    if run.hung in ("busy", "long"):
        yield _standing(run)


@rule(
    why="A run that writes outside of its own folder can overwrite somebody's files.",
    fix="Write only below the folder that the run is started in, or to the path that an option names.",
    runs=WHOLE,
    needs=(WroteOutside,),
    blocks=True,
    always=True,
)
def outside_write(run: Run) -> Said:
    """A file outside of the run's folder was to be written."""
    if seen := _outside(run):
        yield seen


@rule(
    why="The program ended with an error, so nothing after it was done.",
    fix="Read the last line of the error and the line of your program that is named; --verbose shows the traceback.",
    runs=WHOLE,
    after=(outside_write,),
    blocks=True,
    always=True,
)
def crash(run: Run) -> Said:
    """An exception, an exit status, or a process that died."""
    if run.hung or run.flooded:
        return
    seen = _error(run)
    # Two ranks that write one file take it away from each other: then that is what is wrong.
    if seen and not ("No such file" in seen.text and run.shared_file()):
        yield seen


@rule(
    why="A run that takes no step has trained nothing, even if it ends without an error.",
    fix="Call optimizer.step() in a loop over the batches, and see that main() is called.",
    runs=WHOLE,
    after=(address_overwritten, no_group, wrong_group, collectives_differ),
    blocks=True,
    always=True,
)
def no_training(run: Run) -> Said:
    """The run ended well and took no step."""
    if not run.trained and ending(run) is None:
        yield Seen("the run ended without an error and took no step")


def ending(run: Run) -> Seen | None:
    """How a run ended wrongly; None if it ended well."""
    if run.flooded:
        return _flood()
    if run.hung:
        return _standing(run)
    return _outside(run) or _error(run)


def _flood() -> Seen:
    return Seen("it printed more than 20 MB, and the check ended it")


def _outside(run: Run) -> Seen | None:
    event = next(run.all(WroteOutside), None)
    return (
        None
        if event is None
        else Seen(f"it writes to {event.path}, outside of the folder that it runs in", event.where)
    )


# ---------------------------------------------------------------- hangs


def _alive(run: Run) -> list[Process]:
    """The processes that were still there: those of the group, or all where there is none."""
    alive = [process for process in run.processes if process.stack]
    return [process for process in alive if process.rank is not None] or alive


def _position(process: Process) -> tuple[str, str]:
    """Where a process is: the line of the program, and the call that it is in."""
    place, call = "", ""
    for line in process.stack.splitlines():
        found = re.match(r'\s*File "(.+)", line (\d+) in (.+)', line)
        if not found:
            continue
        path, number, function = found.groups()
        if "/workshop/check/" in path:
            continue
        if not re.search(r"/(site-packages|torch|lib/python\d)", path) and not path.startswith("<"):
            return f"{path.rsplit('/', 1)[-1]}:{number}", call
        # The outermost call into a library that has a name of its own: what the program called.
        call = function if function not in ("wrapper", "_fn", "__call__", "_call_impl") else call or function
    return place, call


LEADS = {"idle": "it hangs: ", "busy": "it computes, but takes no step: ", "long": "it had not ended after {:.0f} s; "}


def _standing(run: Run) -> Seen:
    """Which rank is where."""
    places, where = [], ""
    ranked = _alive(run)
    for number, process in enumerate(ranked):
        name = f"rank {process.rank}" if process.rank is not None else f"process {number}"
        place, call = _position(process)
        where = where or place
        verb = "waits" if run.hung != "busy" else "is"
        places.append(f"{name} {verb} in {call or 'its own code'} at {place or 'an unknown line'}")
    places += [
        f"rank {process.rank} has ended" for process in run.ranks if not process.stack and process.rank is not None
    ]
    counts = [str(len(process.steps)) for process in run.trained]
    if len(set(counts)) > 1:
        places.append(f"they took {' and '.join(counts)} steps")
    joining = [process for process in ranked if process.first(Joining) and not process.first(Joined)]
    if joining and len(joining) == len(ranked):
        asked = {(event.world_size, event.port) for process in joining for event in process.of(Joining)}
        text = "; ".join(f"world size {size}, port {port}" for size, port in sorted(asked, key=str))
        places.append(f"they never became one group: they asked for {text}")
    detail = "\n".join(f"rank {process.rank}:\n{process.stack[:3000]}" for process in ranked)
    return Seen(LEADS[run.hung].format(run.seconds) + "; ".join(places), where, detail)


# ---------------------------------------------------------------- errors

# What a message says, and what it means.
EXPLAINED = (
    (
        "Weights only load failed",
        "torch.load(weights_only=True) refuses this file: save only tensors, numbers, lists and dicts",
    ),
    ("mark a variable ready only once", "a parameter is used twice in one backward (checkpointing, or two forwards)"),
    (
        "finished reduction in the prior iteration",
        "some parameters are not used in the loss, and DDP waits for their gradients: use them, or set "
        "find_unused_parameters=True",
    ),
    ("initialize the default process group twice", "init_process_group is called a second time in the same process"),
    ("Address already in use", "the port is taken, by this program itself or by another one"),
    ("EADDRINUSE", "the port is taken, by this program itself or by another one"),
    ("device_ids and output_device", "on the CPU, DDP takes no device_ids"),
    ("Default process group has not been initialized", "a collective is called before init_process_group"),
    ("invalid device ordinal", "there is no device with this number on this machine"),
    ("No NVIDIA driver", "there is no CUDA device here; torch.accelerator names the device that there is"),
    ("Found no NVIDIA driver", "there is no CUDA device here; torch.accelerator names the device that there is"),
    ("Torch not compiled with CUDA", "there is no CUDA device here; torch.accelerator names the device that there is"),
    ("NCCL", "the backend nccl needs GPUs; get_default_backend_for_device chooses the right one"),
    ("writing outside of the run's folder", "the check lets nothing be written outside of the run's folder"),
)


def _error(run: Run) -> Seen | None:
    """What ended the run with an error."""
    found = run.first_exception()
    if found:
        return _exception(run, *found)
    for process in run.processes:
        for event in process.of(Exited):
            if event.status != 0:
                said = process.stderr.strip().splitlines()
                return Seen(f"it ends with exit status {event.status}" + (f": {said[-1][:300]}" if said else ""))
    if run.status in (0, None):
        return None
    silent = next((process for process in run.processes if not process.first(Ended)), None)
    who = f"rank {silent.rank}" if silent and silent.rank is not None else "a process"
    lines = silent.stderr.strip().splitlines() if silent else []
    return Seen(f"{who} died without a traceback (status {run.status})" + (f": {lines[-1][:300]}" if lines else ""))


def _exception(run: Run, process: Process, event: Raised) -> Seen:
    who = f"rank {process.rank}: " if process.rank is not None and run.nproc > 1 else ""
    meaning = next((f" ({text})" for sign, text in EXPLAINED if sign in event.message), "")
    message = event.message[:300] + ("..." if len(event.message) > 300 else "")
    return Seen(f"{who}{event.type}: {message}{meaning}", event.where, event.traceback)
