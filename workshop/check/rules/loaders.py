"""The worker processes of a DataLoader, the samples that they read and their random numbers; loaders without batches."""

import re
from itertools import combinations

from workshop.check.evidence.events import Drawn, EpochSet, Key, LoaderStarted
from workshop.check.evidence.misuses import LoaderMade, WorkerBegun, WorkersKept
from workshop.check.evidence.run import Run
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import named

TURNS = 8  # of the workers of a loader
# Attributes of a data set by which it chooses, orders or changes its samples in an epoch.
OF_EPOCH = re.compile(r"epoch|seed|round|offset|position|stage|start", re.IGNORECASE)
MANY = 64  # samples of a worker in an epoch


@rule(
    why="Each worker of a DataLoader has its own copy of an IterableDataset, so a rank trains on the same samples several times.",
    fix="In __iter__ of the IterableDataset, call get_worker_info() and let each worker read a different part: begin at "
    "rank * num_workers + id and read every (world_size * num_workers)th document.",
    needs=(Drawn,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def workers_overlap(run: Run) -> Said:
    """The workers of a rank return the same samples."""
    for process in run.trained:
        streams = {(each.loader, each.iteration): each for each in process.of(LoaderStarted) if each.workers > 1}
        for loader, started in streams.items():
            passes = [each.forward for each in process.backwards if each.forward and each.forward.loader == loader]
            batches = [forward.keys for forward in passes]
            if _read_alike(batches, started.workers):
                seen = f"the {started.workers} workers of the loader of {named(process)} return the same samples"
                yield Seen(
                    f"{seen}, from their first batches on", started.source or started.where, origin="stream:share"
                )
                return
            if common := _read_in_other_orders(batches, started.workers):
                seen = f"two workers of the loader of {named(process)} share {common} of their samples, each in its own order"
                yield Seen(seen, started.source or started.where, origin="stream:share")
                return


def _read_alike(batches: list[list[Key]], workers: int) -> bool:
    """Whether the batches of all workers, which take turns, begin with the same samples."""
    turns = [batches[first : first + workers] for first in range(0, len(batches) - workers + 1, workers)][:TURNS]
    if len(turns) < 2 or any(len(set(batch)) < max(2, 0.9 * len(batch)) for turn in turns for batch in turn):
        return False  # the content does not identify a sample
    alike = [sum(set(turn[0]) == set(batch) for batch in turn) > 1 for turn in turns]
    return all(alike) and not set(turns[0][0]) & set(turns[1][0])


def _read_in_other_orders(batches: list[list[Key]], workers: int) -> int:
    """How many samples two workers, which take turns, have both read; 0: few, or a worker reads some of its own twice."""
    own = [[key for batch in batches[worker::workers] for key in batch] for worker in range(workers)]
    sizes = [len(set(keys)) for keys in own]
    if min(sizes) < MANY or any(size < len(keys) for size, keys in zip(sizes, own, strict=True)):
        return 0
    common = max(len(set(one) & set(other)) for one, other in combinations(own, 2))
    return common if common > 0.1 * min(sizes) else 0


@rule(
    why="Each epoch repeats the augmentations of the first one, so the model sees less variety.",
    fix="Seed in worker_init_fn with torch.initial_seed(), which is a different number for each worker and epoch, and create "
    "generators of the data set there, not in __init__.",
    needs=(WorkerBegun,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def workers_repeat(run: Run) -> Said:
    """The workers of a training loader begin each epoch with the same state of a random generator that they use."""
    for process in run.trained[:1]:
        trained = {each.forward.loader for each in process.backwards if each.forward}
        started = process.of(LoaderStarted)
        lines = {each.where for each in started if (each.loader, each.iteration) in trained}
        lines -= {each.where for each in started if (each.loader, each.iteration) not in trained}
        for where in lines:
            begun = [each for each in run.all(WorkerBegun) if (each.where, each.rank) == (where, process.rank or 0)]
            states = [each.states for each in begun if each.worker == 0]
            for name in states[0] if len(states) > 1 else ():
                if len({each.get(name) for each in states}) == 1:
                    seen = f"in each of {len(states)} epochs the workers begin with the same state of {name}, and draw from it"
                    own = name.startswith("self.")
                    yield Seen(
                        seen, where, origin=f"member:{name[5:]}" if own else "in-worker call:.worker_init_fn here"
                    )
                    return


@rule(
    why="Each rank takes its part of a different order, so in an epoch several ranks train on some samples, and none on others.",
    fix="Call set_epoch() of the DistributedSampler with the same number on all ranks, such as that of the epoch.",
    needs=(EpochSet,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def epochs_of_ranks(run: Run) -> Said:
    """``set_epoch`` of a DistributedSampler gets different numbers on the ranks."""
    for first, *others in zip(*(process.of(EpochSet) for process in run.trained), strict=False):
        other = next((each for each in others if each.where == first.where and each.epoch != first.epoch), None)
        if other:
            yield Seen(f"set_epoch() gets {first.epoch} on one rank, and {other.epoch} on another", first.where)
            return
        if any(each.where != first.where for each in others):
            return


@rule(
    why="Persistent workers keep the copy of the data set with which they were started, so they work with the old value in all "
    "epochs, for example with the order of the first one.",
    fix="Pass persistent_workers=False to the DataLoader, so that each epoch starts workers with the current data set; or keep "
    "the value in shared memory, for example in a tensor after share_memory_().",
    needs=(WorkersKept,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def workers_kept(run: Run) -> Said:
    """Between two epochs the program changes an attribute of a data set, of which persistent workers have a copy."""
    for event in run.all(WorkersKept):
        if names := [name for name in event.names if OF_EPOCH.search(name)]:
            seen = f"the program changes `{names[0]}` of the data set between two epochs, but persistent workers"
            yield Seen(f"{seen} keep the old value", event.where)
            return


@rule(
    why="The loop over it does nothing, so nothing is trained or evaluated, and a mean over its samples is 0 / 0.",
    fix="Leave drop_last of the DataLoader at False for an evaluation, or use a batch_size of at most the samples of a rank.",
    needs=(Drawn,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def loader_empty(run: Run) -> Said:
    """A loader has no batches on any rank."""
    lengths: dict[str, list[int | None]] = {}
    for process in run.processes:
        made = {event.loader: event.where for event in process.of(LoaderMade)}
        for event in process.of(LoaderStarted):
            lengths.setdefault(made.get(event.loader, event.where), []).append(event.length)
    for where, found in lengths.items():
        if set(found) == {0}:
            yield Seen(
                "the loader has no batches: its samples do not fill one, and it drops the last one",
                where,
                origin="loader:itself",
            )
            return
