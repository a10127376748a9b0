"""What a run writes and prints: one writer for each file, one rank that prints, checkpoints that are complete."""

import re
from collections import Counter

from workshop.check.evidence.events import FileRenamed, FileWritten, Saved, StepTaken
from workshop.check.evidence.run import Process, Run
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import SPLIT, WHOLE, Split


@rule(
    why="Two processes that write the same file sooner or later leave a mixture of both.",
    fix="Write only on rank 0 (`if rank == 0:`), or give each rank a file name of its own.",
    runs=WHOLE,
    needs=(FileWritten,),
    anywhere=True,
)
def two_writers(run: Run) -> Said:
    """Several ranks write one file."""
    shared = run.shared_file()
    if shared:
        path, processes, where = shared
        numbers = (index if process.rank is None else process.rank for index, process in enumerate(processes))
        ranks = " and ".join(map(str, numbers))
        yield Seen(f"ranks {ranks} write {path.rsplit('/', 1)[-1]}", where)


@rule(
    why="The same line from every process hides what matters, and the more processes there are the more it hides.",
    fix="Print on rank 0 only, and give tqdm `disable=rank > 0`; or put the rank at the start of the line.",
    runs=WHOLE,
    anywhere=True,
)
def several_print(run: Run) -> Said:
    """Two ranks print the same lines."""
    ranks = [process for process in run.ranks if process.stdout.strip()]
    if len(ranks) < 2:
        return
    both = _patterns(ranks[0]) & _patterns(ranks[1])
    for line in (line.strip() for line in ranks[1].stdout.splitlines()):
        if _pattern(line) in both:
            first, second = (
                f"rank {process.rank}" if process.rank is not None else "a process" for process in ranks[:2]
            )
            yield Seen(f'{second} prints what {first} prints too: "{line[:70]}"')
            return


def _pattern(line: str) -> str:
    return re.sub(r"[\d.,]+", "#", line)


def _patterns(process: Process) -> set[str]:
    """The lines of a process without their numbers; those that name a rank are its own."""
    lines = (line.strip() for line in process.stdout.splitlines())
    shared = (line for line in lines if not re.search(r"\brank\W{0,3}\d|^\W*\d+\W*[|:\]]", line, re.IGNORECASE))
    return {_pattern(line) for line in shared if re.search(r"\w", line)}


@rule(
    why="A process that dies while it writes in place leaves half a file, and nothing to resume from.",
    fix="Save under a temporary name in the same folder, then move it with os.replace, which is atomic.",
    runs=WHOLE,
    needs=(Saved, FileRenamed),
    anywhere=True,
)
def snapshot_torn(run: Run) -> Said:
    """A checkpoint is written over the one before."""
    moved = {event.source for event in run.all(FileRenamed)}
    saves = [(process, event) for process in run.processes for event in process.of(Saved) if event.path]
    counts = Counter((process.pid, event.path) for process, event in saves)
    for process, event in saves:
        in_folder = any(event.path.startswith(source + "/") for source in moved)  # which was moved when it was complete
        moved_later = event.whole or event.path in moved or in_folder
        if not moved_later and counts[process.pid, event.path] > 1:
            name = event.path.rsplit("/", 1)[-1]
            yield Seen(f"{name} is written in place: a process that dies meanwhile leaves half of it", event.where)
            return


@rule(
    why="After a crash there is nothing to resume from.",
    fix="Save model, optimizer and epoch at the end of each epoch, on rank 0.",
    runs=WHOLE,
    needs=(Saved,),
    after=(snapshot_torn,),
)
def no_snapshot(run: Run) -> Said:
    """Nothing is saved, or only at the end."""
    if not run.trained or run.asked is None or not run.asked.epochs:
        return
    saves = [(process, seconds, event) for process in run.processes for seconds, event in process.timed(Saved)]
    named = [event for _, _, event in saves if event.path]
    if not named:
        yield Seen("nothing was saved")
        return
    steps = {sum(step.seconds <= seconds for step in process.steps) for process, seconds, _ in saves}
    total = max(len(process.steps) for process in run.processes)
    if run.asked.epochs > 1 and not any(0 < count < total for count in steps):
        yield Seen(f"the first checkpoint is saved at the end, after all {plural(total, 'step')}", named[0].where)


@rule(
    why="The checkpoint does not fit the plain model: nobody can load it without the same wrapper.",
    fix="Save the state of the model inside: ddp_model.module.state_dict().",
    runs=(WHOLE, SPLIT),
    needs=(Saved,),
)
def snapshot_keys(run: Run, split: Split) -> Said:
    """The parameters are saved under names that begin with "module.", and the second start fails."""
    where = prefixed(split.first)
    found = split.second.first_exception()
    if where and split.second.failed and not split.second.trained:
        seen = 'the parameters are saved under names that begin with "module.", and the second start fails'
        message = f": {found[1].type}: {found[1].message[:200]}" if found else ""
        yield Seen(seen + message, where.strip("?"), found[1].traceback if found else "")


def prefixed(run: Run) -> str:
    """The line that saved a checkpoint whose keys all begin with "module."; "?" if unknown, "" if there is none."""
    for event in run.all(Saved):
        if event.keys and all(key.startswith("module.") for key in event.keys):
            return event.where or "?"
    return ""


@rule(
    why="Writing a checkpoint takes far longer than a step, and the devices wait for it.",
    fix="Save at the end of each epoch, or when some minutes have passed since the last checkpoint.",
    runs=WHOLE,
    needs=(Saved, StepTaken),
    hint=True,
    anywhere=True,
)
def saves_every_step(run: Run) -> Said:
    """A checkpoint is saved after nearly every step."""
    for process in run.trained[:1]:
        saves = [(seconds, event) for seconds, event in process.timed(Saved) if event.path]
        saved_after = {sum(step.seconds <= seconds for step in process.steps) for seconds, _ in saves}
        if len(process.steps) > 4 and len(saved_after) > 0.8 * len(process.steps):
            seen = f"{plural(len(saves), 'checkpoint')} in {plural(len(process.steps), 'step')}"
            yield Seen(seen, saves[0][1].where)
