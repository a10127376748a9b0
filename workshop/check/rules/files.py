"""What a run writes and prints: one writer per file, one rank that prints, and complete checkpoints."""

import re
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import PurePath

from workshop.check.evidence.events import (
    Backward,
    CheckpointCalled,
    Collective,
    FileRenamed,
    FileWritten,
    FullySharded,
    InnerCollective,
    Joined,
    Loaded,
    Raised,
    Saved,
    Wrapped,
)
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import crash, ended_early
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import named, plural, rank_of
from workshop.check.scenarios import DEVICES, SPLIT, TWO_NODES, WHOLE, Split

REMOVES = re.compile(r"\b(?:remove|unlink|rmtree|rmdir)\(")
OTHERWISE = re.compile(r"Unpickling|FileNotFound|OutOfMemory|Attribute")  # errors of a load that names cannot cause
OF_DEEPSPEED = r"^\[[\d ,:-]+\] \[[A-Z]+\] \[|^DeepSpeed deepspeed\.ops"  # lines of its own logger, on each rank
TEMPORARY = re.compile(r"[._-](tmp|temp|part|partial|incomplete)\b")  # in the name of what is not complete yet
MILD = ("/.hydra/", "/events.out.tfevents.")
SETTINGS = re.compile(
    r"(^|[/_.-])(configs?|args|arguments|opts?|options|settings|hparams|hyperparameters)\.(json|txt)$|\.(ya?ml|toml)$"
)
LINES = (".txt", ".log", ".csv", ".jsonl")  # texts for people
TIME = re.compile(r"\d+-\d+-\d+[T ]|\d+:\d+(:\d+)?([.,]\d+)?")
WRITERS = 3  # findings of files that several ranks write, each at a line of its own


@rule(
    why="If two processes write the same file at the same time, it can contain a mixture of both.",
    fix="Write only on rank 0 (`if rank == 0:`), or give each rank its own file name.",
    anywhere=True,
    origin="gate:alone ungated",
)
def two_writers(run: Run) -> Said:
    """Several ranks write the same file."""
    for path, processes, where in run.shared_files()[:WRITERS]:
        ranks = " and ".join(str(rank_of(processes, index)) for index in range(len(processes)))
        # Settings are the same on all ranks, in a file for people. A writer of TensorBoard writes its version into a new file.
        mild = any(each in path for each in MILD) or SETTINGS.search(path) is not None or _begun(path, processes)
        yield Seen(f"ranks {ranks} write the same file, {path.rsplit('/', 1)[-1]}", where, mild=mild)


def _begun(path: str, processes: list[Process]) -> bool:
    """Whether all ranks begin a text, for example with a heading, before the first step, and at most one opens it later."""
    late = 0
    for process in processes:
        opened = [seconds for seconds, event in process.timed(FileWritten) if event.path == path]
        late += not process.steps or opened[-1] > process.steps[0].seconds
    return path.endswith(LINES) and late < 2


@two_writers.also(TWO_NODES)
def writers_on_two_nodes(run: Run) -> Said:
    """On two machines that share a file system, a rank of each machine writes the same file. (Not every program needs two.)"""
    if run.asked is None:
        return
    for seen in two_writers.detectors[0].function(run):
        yield replace(seen, text=f"on two machines that share a file system, {seen.text}")


@rule(
    why="A rank can look for the folder before another one has created it, and create it after that. It happens only sometimes.",
    fix="Call os.makedirs(path, exist_ok=True): then it is no error if the folder exists.",
    instead_of=(crash, ended_early),
    anywhere=True,
)
def folder_made_twice(run: Run) -> Said:
    """A rank fails to create a folder that another rank has created at the same moment."""
    failed = [
        (process, event)
        for process in run.processes
        for event in process.of(Raised)
        if event.type == "FileExistsError" and re.search(r"\b(?:mkdir|makedirs)\b", event.traceback)
    ]
    if 0 < len(failed) < run.nproc:  # if it existed before the start, all ranks fail
        process, event = failed[0]
        path = re.search(r"'([^']+)'", event.message)
        folder = path[1].rstrip("/").rsplit("/", 1)[-1] if path else "a folder"
        yield Seen(f"{named(process)} fails to create {folder}, which another rank has created meanwhile", event.where)


folder_made_twice.also(DEVICES)(folder_made_twice.detectors[0].function)


@rule(
    why="All ranks try to remove the same file or folder: the first one succeeds, and the others fail.",
    fix="Remove it on one rank only: if rank == 0: os.remove(path).",
    instead_of=(crash, ended_early),
    anywhere=True,
)
def removed_twice(run: Run) -> Said:
    """A rank fails to remove what another rank has removed."""
    failed = [(process, event) for process in run.ranks for event in process.of(Raised) if _removes(event)]
    if 0 < len(failed) < run.nproc:
        process, event = failed[0]
        name = event.message.rsplit("'", 2)[-2].rstrip("/").rsplit("/", 1)[-1]
        yield Seen(f"{named(process)} fails to remove {name}, which another rank has removed", event.where)


removed_twice.also(DEVICES)(removed_twice.detectors[0].function)


def _removes(event: Raised) -> bool:
    """Whether an exception says that what a statement is to remove does not exist."""
    return event.type == "FileNotFoundError" and "'" in event.message and bool(REMOVES.search(event.traceback))


@rule(
    why="A rank that does not wait can find an earlier version of the file, a part of it, or none.",
    fix="Call torch.distributed.barrier() on all ranks between torch.save() on one rank and torch.load() on the others.",
    instead_of=(crash, ended_early),
    anywhere=True,
)
def read_before_written(run: Run) -> Said:
    """A rank loads a file that a different rank writes, and no collective makes it wait for that rank."""
    if run.nproc < 2 or any(run.all(FullySharded)):  # the collectives of its forward passes are not recorded
        return
    ranks = {process.rank: process for process in run.ranks}
    for rank, reader in ranks.items():
        own = {*(event.path for event in reader.of(FileWritten)), *(event.path for event in reader.of(Saved))}
        for seconds, event in reader.timed(Loaded):
            for other, writer in ranks.items():
                if not event.path or event.path in own or other == rank:
                    continue
                written, now = _written(writer, event.path), _meetings(reader, seconds)
                ends = [end for end, met in written if met == now]
                # A program that waits until the file exists cannot wait in this way for a second version.
                if ends and (seconds < max(ends) or min(met for _, met in written) < now):
                    name = event.path.rsplit("/", 1)[-1]
                    yield Seen(
                        f"{named(reader)} loads {name} without waiting until {named(writer)} has written it",
                        event.where,
                        origin=_wait_for(writer, event.path, event.where),
                    )
                    return


@read_before_written.also(WHOLE, instead_of=(crash, ended_early))
def missing_until_written(run: Run) -> Said:
    """A rank does not find a file that a different rank writes in the same run."""
    for reader, writer in permutations(run.ranks, 2):
        for error in (each for each in reader.of(Raised) if not _removes(each)):
            path = re.search(r"No such file or directory: '[./]*([^']+)'", error.message)
            found = [event for event in writer.of(FileWritten) if path and _makes(event.path, path[1])]
            if path and found:
                name = path[1].rsplit("/", 1)[-1]
                seen = f"{named(reader)} does not find {name}, which {named(writer)} writes in the same run"
                yield Seen(seen, error.where, origin=_wait_for(writer, found[0].path, error.where))
                return


def _makes(written: str, missing: str) -> bool:
    """Whether a written path belongs to a missing one: the same, in it, or a folder around it; or will when it is renamed."""
    written = TEMPORARY.sub("", written)
    around = [str(each) for each in PurePath(missing).parents if each.name]
    return f"/{missing}/" in f"{written}/" or any(written.endswith(f"/{each}") for each in around)


@rule(
    why="The other rank then fails, or its file is missing in the checkpoint.",
    fix="Call torch.distributed.barrier() on all ranks, or accelerator.wait_for_everyone(), before one rank renames the folder.",
    anywhere=True,
)
def renamed_before_written(run: Run) -> Said:
    """A rank renames a folder into which a different rank writes, and no collective makes it wait for that rank."""
    if run.nproc < 2 or any(run.all(FullySharded)):
        return
    for one, other in permutations(run.ranks, 2):
        together = {event.where for event in one.of(CheckpointCalled) if event.name == "save"}  # it waits for all ranks
        for seconds, event in one.timed(FileRenamed):
            written = [(at, each.path) for at, each in other.timed(FileWritten) if each.where not in together]
            written += [(at, each.path) for at, each in other.timed(Saved)]
            inside = [at for at, path in written if at < seconds and path.startswith(f"{event.source}/")]
            if inside and _meetings(other, max(inside)) == _meetings(one, seconds):
                name = event.source.rsplit("/", 1)[-1]
                seen = f"{named(one)} renames {name} without waiting until {named(other)} has written its files there"
                yield Seen(seen, event.where)
                return


def _wait_for(writer: Process, path: str, reads: str) -> str:
    """Where a rank must wait for the one that writes a file: in the function that calls both the writing and the reading."""
    wheres = [event.where for event in writer.of(FileWritten) if event.path == path]
    wheres += [event.where for event in writer.of(Saved) if event.path == path]
    same = [where for where in wheres if where.rpartition(":")[0] == reads.rpartition(":")[0]]
    return f"meets:{same[0].rpartition(':')[2]}" if same else ""


def _meetings(process: Process, seconds: float) -> int:
    """How often a process has met all others before a time: it cannot pass a collective that a different rank has not reached."""
    meets = (Backward, Collective, InnerCollective, Joined, Wrapped)
    return sum(isinstance(event, meets) and not _of_some(event) for at, event in process.events if at < seconds)


def _of_some(event: object) -> bool:
    """Whether only some ranks take part in a collective."""
    return isinstance(event, Collective) and bool(event.group or event.point_to_point)


def _written(process: Process, path: str) -> list[tuple[float, int]]:
    """When the process had written a file: until then, a different rank cannot read it. With the number of meetings before."""
    found, renamed = [], False
    for index, (seconds, event) in enumerate(process.events):
        if isinstance(event, (FileWritten, Saved)) and event.path == path:
            following = process.events[index + 1 :]  # it has written the file when it does something else
            end = seconds if renamed else next((at for at, each in following if not isinstance(each, Saved)), seconds)
            found.append((end, _meetings(process, seconds)))
        renamed = isinstance(event, FileRenamed)
    return found


@rule(
    why="With many processes, repeated lines hide the important output.",
    fix="Print on rank 0 only, and pass `disable=rank > 0` to tqdm; or begin each line with the rank.",
    anywhere=True,
    mild=True,
    origin="printed",
)
def several_print(run: Run) -> Said:
    """Two ranks print the same lines."""
    ranks = [process for process in run.ranks if process.stdout.strip()]
    if len(ranks) > 1:
        known = dict(reversed(_lines(ranks[0])))  # the first line of each pattern
        first = dict(reversed(_lines(ranks[1])))
        same = [line for pattern, line in first.items() if pattern in known and not _tell_ranks(known[pattern], line)]
        for line in same[:1]:
            equal = TIME.sub("", line) in {TIME.sub("", each) for each in known.values()}
            how = "the same lines as" if equal else "other numbers in the same lines as"
            yield Seen(f'{named(ranks[1])} prints {how} {named(ranks[0])}: "{line[:70]}"')


def _tell_ranks(one: str, other: str) -> bool:
    """Whether lines of rank 0 and rank 1 differ in the number of the rank, such as in that of the GPU."""
    numbers = zip(re.findall(r"\d+", one), re.findall(r"\d+", other), strict=False)
    return ("0", "1") in numbers


def _lines(process: Process) -> list[tuple[str, str]]:
    """Return the lines of a process, each with its pattern without numbers, except lines that name a rank or its device."""
    lines = [line.strip() for line in process.stdout.splitlines() if re.search(r"\w", line)]
    # On GPUs, each rank prints the number of its GPU in place of "cpu".
    own = re.compile(r"\brank\W{0,3}\d|^\W*\d+\W*[|:\]]|\bdevice\b.*\bcpu\b|" + OF_DEEPSPEED, re.IGNORECASE)
    return [(re.sub(r"[\d.,]+", "#", line), line) for line in lines if not own.search(line)]


@rule(
    why="A process that dies while it overwrites the checkpoint leaves an incomplete file, so the run cannot resume.",
    fix="Save under a temporary name in the same folder, then rename it with os.replace, which is atomic.",
    anywhere=True,
    mild=True,
)
def checkpoint_torn(run: Run) -> Said:
    """A checkpoint is written over the previous one."""
    moved = tuple(f"{event.source}/" for event in run.all(FileRenamed))  # files and folders that were complete then
    saves = [(process.pid, event) for process in run.processes for event in process.of(Saved) if event.path]
    counts = Counter((pid, event.path) for pid, event in saves)
    for pid, event in saves:
        if counts[pid, event.path] > 1 and not event.whole and not f"{event.path}/".startswith(moved):
            name = event.path.rsplit("/", 1)[-1]
            yield Seen(f"{name} is overwritten in place: a crash meanwhile leaves an incomplete file", event.where)
            return


@rule(
    why="After a crash there is nothing to resume from.",
    fix="Save the state_dict() of model and optimizer and the epoch with torch.save at the end of each epoch, on rank 0.",
    after=(checkpoint_torn,),
    origin="gate call:ModelCheckpoint|save_checkpoint|save",
)
def no_checkpoint(run: Run) -> Said:
    """Nothing is saved, or only at the end."""
    if not run.trained or run.asked is None or not run.asked.epochs:
        return
    files = [event for event in run.all(Saved) if event.path]
    saves = [(process, seconds) for process in run.processes for seconds, _ in process.timed(Saved)]
    counts = [sum(step.seconds <= seconds for step in process.steps) for process, seconds in saves]
    total = max(len(process.steps) for process in run.processes)
    if not files:
        yield Seen("nothing was saved")
    elif run.asked.epochs > 1 and not any(0 < count < total for count in counts):
        yield Seen(f"the first checkpoint is saved at the end, after all {plural(total, 'step')}", files[0].where)


@rule(
    why="The names do not match those of the plain model, so the checkpoint loads only into a model with the same wrapper.",
    fix="Save the state_dict() of the model inside the wrapper: ddp_model.module.state_dict().",
    runs=(WHOLE, SPLIT),
    anywhere=True,
    origin="passed",
)
def checkpoint_keys(_: Run, split: Split) -> Said:
    """The parameters are saved under names that begin with "module.", and the second start fails."""
    saved = [event for event in split.first.all(Saved) if event.keys]
    wrapped = [event for event in saved if all(key.startswith("module.") for key in event.keys)]
    found = split.second.first_exception()
    if wrapped and split.second.failed and not split.second.trained and not (found and OTHERWISE.search(found[1].type)):
        error, detail = (f": {found[1].type}: {found[1].message[:200]}", found[1].traceback) if found else ("", "")
        text = 'the parameters are saved under names that begin with "module.", and the second start fails'
        yield Seen(text + error, wrapped[0].where, detail)
