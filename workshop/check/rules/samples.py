"""Which samples each rank trains on, in which order, and whether the model is judged on others."""

import itertools
from collections.abc import Iterator

from workshop.check.evidence.events import Backward, BatchLoaded, EpochSet, Evaluated, LoaderStarted
from workshop.check.evidence.run import Process, Run
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural, rank_of


@rule(
    why="The model is judged on samples that it was trained on, so the figure is too good.",
    fix="Split the data set with the same seed on all ranks: random_split(..., generator=torch.Generator().manual_seed(SEED)).",
    needs=(Backward, Evaluated),
    after=(no_group, wrong_group),
    anywhere=True,
)
def leak(run: Run) -> Said:
    """Samples are evaluated that some rank has trained on."""
    trained = {key for process in run.ranks for epoch in process.epochs for key in epoch}
    evaluated = {key for process in run.ranks for phase in process.evaluations for key in phase}
    both = len(trained & evaluated)
    if both > 0.02 * len(evaluated):
        where = next((event.where for process in run.ranks for event in process.of(Evaluated)), "")
        yield Seen(f"{both:,} of the {len(evaluated):,} samples evaluated are trained on by some rank", where)


@rule(
    why="Every rank does the same work: the averaged gradient is that of one batch, at the price of several.",
    fix="Give the DataLoader a DistributedSampler (sampler=..., without shuffle=True): it gives each rank a different part.",
    needs=(Backward, LoaderStarted),
    after=(no_group, wrong_group),
    anywhere=True,
)
def same_samples(run: Run) -> Said:
    """Two ranks train on the same samples."""
    return _overlap(run, "same")


@rule(
    why="Samples that two ranks train on count twice, and others not at all.",
    fix="Split and shuffle the data set with the same seed on all ranks, and let a DistributedSampler distribute it.",
    needs=(Backward, LoaderStarted),
    after=(no_group, wrong_group, same_samples),
    anywhere=True,
)
def shares_overlap(run: Run) -> Said:
    """Two ranks share some of their samples."""
    return _overlap(run, "some")


def _overlap(run: Run, kind: str) -> Said:
    """The first two ranks that share samples, in an epoch or at the same steps, if they share the "same" or "some"."""
    by_epoch = all(each.forward and each.forward.loader for process in run.trained for each in process.of(Backward))
    # Where no loader divides the run into epochs, only steps can be compared.
    found = next(itertools.chain(_epoch_overlaps(run) if by_epoch else (), _step_overlaps(run)), None)
    if found and found[0] == kind:
        yield Seen(found[1], run.trained[0].data_where)


def _pairs(run: Run) -> Iterator[tuple[int, int, str]]:
    """Each two ranks that trained: their places in the list, and their names."""
    for one, other in itertools.combinations(range(len(run.trained)), 2):
        yield one, other, f"ranks {rank_of(run.trained, one)} and {rank_of(run.trained, other)}"


def _epoch_overlaps(run: Run) -> Iterator[tuple[str, str]]:
    for number, together in enumerate(zip(*(process.epochs for process in run.trained), strict=False), 1):
        sets = [set(keys) for keys in together]
        for one, other, names in _pairs(run) if min(map(len, sets)) >= 4 else ():
            both, smaller = len(sets[one] & sets[other]), min(len(sets[one]), len(sets[other]))
            if both >= 0.95 * smaller:
                yield "same", f"{names} saw the same {both:,} samples in epoch {number}"
            elif both > run.nproc - 1 and both > 0.03 * smaller:
                yield "some", f"{names} share {both:,} of their {smaller:,} samples in epoch {number}"


def _step_overlaps(run: Run) -> Iterator[tuple[str, str]]:
    for first, second, names in _pairs(run):
        steps = zip(run.trained[first].steps, run.trained[second].steps, strict=False)
        pairs = [(set(one.keys), set(other.keys)) for one, other in steps]
        fractions = [len(one & other) / min(len(one), len(other)) for one, other in pairs if one and other]
        same = sum(fraction >= 0.95 for fraction in fractions)
        mean = sum(fractions) / max(len(fractions), 1)
        if same > len(fractions) / 2:
            yield "same", f"at {same} of {len(fractions)} steps {names} train on the same samples"
        elif mean > 0.1:
            yield "some", f"at each step {names} share {mean:.0%} of their samples"


@rule(
    why="The model cannot learn from samples that no rank sees.",
    fix="Give DistributedSampler the whole training set, with the number of processes and the rank of the group.",
    needs=(Backward, LoaderStarted, Evaluated),
    after=(no_group, wrong_group, same_samples, shares_overlap),
)
def samples_missed(run: Run) -> Said:
    """In an epoch, samples of the data set are trained on by no rank."""
    ranks = run.trained
    evaluated = {key for process in ranks for phase in process.evaluations for key in phase}
    step = sum(len(process.steps[0].keys) for process in ranks) * run.accumulate
    epochs = zip(*(process.epochs for process in ranks), strict=False) if len(ranks) > 1 else ()
    for number, together in enumerate(epochs, 1):
        trained = set().union(*together)
        data_sets = {key[:2] for key in trained}
        kind, length = next(iter(data_sets)) if len(data_sets) == 1 else ("content", 0)
        if kind == "content":
            continue
        size = int(str(length))
        left = size - len(trained | {key for key in evaluated if key[:2] in data_sets})
        if left >= max(step, run.nproc) + run.nproc and not _stopped_early(ranks[0], number, run.accumulate):
            yield Seen(f"in epoch {number} {left:,} of {size:,} samples are seen by no rank", ranks[0].data_where)
            return


def _stopped_early(process: Process, number: int, accumulate: int) -> bool:
    """Whether the program left an epoch's loader before its end, on purpose: then no sample was forgotten."""
    loaders = [each.forward.loader for each in process.of(Backward) if each.forward and each.forward.loader]
    lengths = {(event.loader, event.iteration): event.length or 0 for event in process.of(LoaderStarted)}
    here = list(dict.fromkeys(loaders))[number - 1 : number]
    return any(loaders.count(loader) < lengths.get(loader, 0) - accumulate for loader in here)


@rule(
    why="With the same batches in every epoch the model learns less from the same data.",
    fix="Call sampler.set_epoch(epoch) at the start of each epoch.",
    needs=(Backward, EpochSet),
    after=(no_group, wrong_group, same_samples, shares_overlap, samples_missed),
    anywhere=True,
)
def same_order(run: Run) -> Said:
    """Two epochs have the same samples in the same order."""
    for process in run.trained[:1]:
        epochs = process.epochs
        if len(epochs) > 1 and len(epochs[0]) > 8 and epochs[0] == epochs[1] and len(set(epochs[0])) > 1:
            calls = [event.epoch for event in process.of(EpochSet)]
            never = "; set_epoch was never called" if run.nproc > 1 else ""
            extra = f"; set_epoch was called with {calls}" if calls else never
            yield Seen(f"epoch 2 has the same samples in the same order as epoch 1{extra}", process.data_where)


@rule(
    why="Loading a batch that is thrown away costs time, and starting workers for it costs more.",
    fix="Use every batch that the loader gives, or take a single sample from the data set itself.",
    needs=(BatchLoaded, Backward, Evaluated),
    after=(no_group, wrong_group),
    hint=True,
    anywhere=True,
)
def batch_wasted(run: Run) -> Said:
    """More batches are loaded than used."""
    for process in run.trained if len(run.trained) > 1 else ():
        left = len(process.of(BatchLoaded)) - len(process.of(Backward)) - len(process.of(Evaluated))
        if left > 1:
            yield Seen(f"{plural(left, 'batch')} loaded and not used")
            return


@rule(
    why="Every rank draws the same random numbers: the same dropout, the same augmentation.",
    fix="Seed each rank differently before the training: torch.manual_seed(SEED + rank).",
    needs=(Backward,),
    after=(no_group, wrong_group),
    hint=True,
    anywhere=True,
)
def same_random(run: Run) -> Said:
    """The steps draw random numbers, on all ranks from the same state of the generator."""
    ranks = run.trained
    states = [[each.random for each in process.of(Backward)] for process in ranks]
    if len(ranks) > 1 and ranks[0].draws and all(each == states[0] for each in states[1:]):
        text = "random numbers are drawn in the steps, and at each step all ranks draw the same"
        yield Seen(text, ranks[0].data_where)
