"""Which samples each rank trains on, in which order, and whether the model is judged on others."""

import itertools
from collections.abc import Sequence

from workshop.check.evidence.events import Backward, BatchLoaded, EpochSet, Evaluated, Key, LoaderStarted
from workshop.check.evidence.run import Process, Run
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural, rank_of
from workshop.check.scenarios import WHOLE


@rule(
    why="The model is judged on samples that it was trained on, so the figure is too good.",
    fix="Split the data set with the same generator seed on all ranks before distributing it: "
    "random_split(..., generator=torch.Generator().manual_seed(SEED)).",
    runs=WHOLE,
    needs=(Backward, Evaluated),
    after=(no_group, wrong_group),
    anywhere=True,
)
def leak(run: Run) -> Said:
    """Samples are evaluated that some rank has trained on."""
    trained = {key for process in run.ranks for epoch in process.epochs for key in epoch}
    evaluated = {key for process in run.ranks for phase in process.evaluations for key in phase}
    both = trained & evaluated
    if evaluated and len(both) > 0.02 * len(evaluated):
        where = next((event.where for process in run.ranks for event in process.of(Evaluated)), "")
        seen = f"{len(both):,} of the {len(evaluated):,} samples evaluated are trained on by some rank"
        yield Seen(seen, where)


@rule(
    why="Every rank does the same work: the averaged gradient is that of one batch, at the price of several.",
    fix="Give the DataLoader a DistributedSampler (sampler=..., without shuffle=True): it gives each rank a different part.",
    runs=WHOLE,
    needs=(Backward, LoaderStarted),
    after=(no_group, wrong_group),
    anywhere=True,
)
def same_samples(run: Run) -> Said:
    """Two ranks train on the same samples."""
    found = _first_overlap(run)
    if found and found[0] == "same":
        yield found[1]


@rule(
    why="Samples that two ranks train on count twice, and others not at all.",
    fix="Split the data set once, with the same seed on all ranks, and let a DistributedSampler distribute it; do not shuffle "
    "or split with a different seed on each rank.",
    runs=WHOLE,
    needs=(Backward, LoaderStarted),
    after=(no_group, wrong_group, same_samples),
    anywhere=True,
)
def shares_overlap(run: Run) -> Said:
    """Two ranks share some of their samples."""
    found = _first_overlap(run)
    if found and found[0] == "some":
        yield found[1]


def _first_overlap(run: Run) -> tuple[str, Seen] | None:
    """The first two ranks that have the "same" or "some" samples, in an epoch, or at the same steps."""
    ranks = run.trained
    if len(ranks) < 2:
        return None
    divided = all(each.forward and each.forward.loader for process in ranks for each in process.of(Backward))
    if divided:
        for number, together in enumerate(zip(*(process.epochs for process in ranks), strict=False), 1):
            found = _epoch_overlap(run, ranks, number, together)
            if found:
                return found
    # Where no loader divides the run into epochs, only steps can be compared.
    return _step_overlap(ranks)


def _epoch_overlap(
    run: Run, ranks: list[Process], number: int, together: Sequence[list[Key]]
) -> tuple[str, Seen] | None:
    sets = [set(keys) for keys in together]
    if min(map(len, sets)) < 4:
        return None
    where = ranks[0].data_where
    for one, other in itertools.combinations(range(len(sets)), 2):
        names = f"ranks {rank_of(ranks, one)} and {rank_of(ranks, other)}"
        both, smaller = len(sets[one] & sets[other]), min(len(sets[one]), len(sets[other]))
        if both >= 0.95 * smaller:
            return "same", Seen(f"{names} saw the same {both:,} samples in epoch {number}", where)
        if both > run.nproc - 1 and both > 0.03 * smaller:
            return "some", Seen(f"{names} share {both:,} of their {smaller:,} samples in epoch {number}", where)
    return None


def _step_overlap(ranks: list[Process]) -> tuple[str, Seen] | None:
    where = ranks[0].data_where
    for first, second in itertools.combinations(range(len(ranks)), 2):
        names = f"ranks {rank_of(ranks, first)} and {rank_of(ranks, second)}"
        fractions = []
        for one, other in zip(ranks[first].steps, ranks[second].steps, strict=False):
            here, there = set(one.keys), set(other.keys)
            if here and there:
                fractions.append(len(here & there) / min(len(here), len(there)))
        same = sum(fraction >= 0.95 for fraction in fractions)
        if fractions and same > len(fractions) / 2:
            return "same", Seen(f"at {same} of {len(fractions)} steps {names} train on the same samples", where)
        mean = sum(fractions) / len(fractions) if fractions else 0
        if mean > 0.1:
            return "some", Seen(f"at each step {names} share {mean:.0%} of their samples", where)
    return None


@rule(
    why="The model cannot learn from samples that no rank sees.",
    fix="Give DistributedSampler the whole training set, with the number of processes and the rank of the group.",
    runs=WHOLE,
    needs=(Backward, LoaderStarted, Evaluated),
    after=(no_group, wrong_group, same_samples, shares_overlap),
)
def samples_missed(run: Run) -> Said:
    """In an epoch, samples of the data set are trained on by no rank."""
    ranks = run.trained
    if len(ranks) < 2:
        return
    for number, together in enumerate(zip(*(process.epochs for process in ranks), strict=False), 1):
        missed = _missed(run, ranks, together)
        if missed and not _stopped_early(run, ranks[0], number):
            yield Seen(f"in epoch {number} {missed}", ranks[0].data_where)
            return


def _missed(run: Run, ranks: list[Process], together: Sequence[list[Key]]) -> str:
    trained = set().union(*together)
    names = {key[:2] for key in trained}
    if any(key[0] == "content" for key in trained) or len(names) != 1:
        return ""
    size = int(str(next(iter(names))[1]))
    evaluated = {key for process in ranks for phase in process.evaluations for key in phase if key[:2] in names}
    left = size - len(trained | evaluated)
    step = max(sum(len(process.steps[0].keys) for process in ranks), 1) * run.accumulate
    allowed = max(step, run.nproc) + run.nproc
    return f"{left:,} of {size:,} samples are seen by no rank" if left >= allowed else ""


def _stopped_early(run: Run, process: Process, number: int) -> bool:
    """Whether the program left an epoch's loader before its end, on purpose: then no sample was forgotten."""
    loaders = [each.forward.loader for each in process.of(Backward) if each.forward and each.forward.loader]
    order = list(dict.fromkeys(loaders))
    if number > len(order):
        return False
    here = order[number - 1]
    lengths = {(event.loader, event.iteration): event.length for event in process.of(LoaderStarted)}
    return loaders.count(here) < (lengths.get(here) or 0) - run.accumulate


@rule(
    why="With the same batches in every epoch the model learns less from the same data.",
    fix="Call sampler.set_epoch(epoch) at the start of each epoch.",
    runs=WHOLE,
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


# ---------------------------------------------------------------- matters of taste


@rule(
    why="Loading a batch that is thrown away costs time, and starting workers for it costs more.",
    fix="Use every batch that the loader gives, or take a single sample from the data set itself.",
    runs=WHOLE,
    needs=(BatchLoaded, Backward, Evaluated),
    after=(no_group, wrong_group),
    hint=True,
    anywhere=True,
)
def batch_wasted(run: Run) -> Said:
    """More batches are loaded than used."""
    if len(run.trained) < 2:
        return
    for process in run.trained:
        left = len(process.of(BatchLoaded)) - len(process.of(Backward)) - len(process.of(Evaluated))
        if left > 1:
            yield Seen(f"{plural(left, 'batch')} loaded and not used")
            return


@rule(
    why="Every rank draws the same random numbers: the same dropout, the same augmentation.",
    fix="Seed each rank differently before the training: torch.manual_seed(SEED + rank).",
    runs=WHOLE,
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
        seen = "random numbers are drawn in the steps, and at each step all ranks draw the same"
        yield Seen(seen, ranks[0].data_where)
