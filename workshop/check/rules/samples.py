"""The samples that each rank trains on, their order, and whether the model is evaluated on different ones."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, takewhile

from workshop.check.evidence.events import (
    DATA_SET,
    SUBSET,
    BatchLoaded,
    Drawn,
    EpochSet,
    Evaluated,
    Key,
    LoaderStarted,
    TrainerFit,
)
from workshop.check.evidence.misuses import OtherSamplerSet, SharedChanged, StatePrepared
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import crash, ended_early
from workshop.check.rules.loaders import epochs_of_ranks, workers_kept
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Makes, Rule, Said, Seen, if_first, rule
from workshop.check.rules.shares import (
    batches,
    beside_main,
    different_steps,
    endless,
    in_a_last_batch,
    kept_batches,
    orders,
    plays,
    share_of_each,
    shared,
    shuffled_below,
    slices,
    stopped_early,
    unequal_draw,
    unequal_split,
    unequal_subset,
    unused_batches,
)
from workshop.check.rules.words import plural, rank_of
from workshop.check.scenarios import COMPARED, WHOLE, Compared

SAME_SUBSET = (
    "Compute the indices on all ranks from the same values, or choose them on rank 0 and send them with "
    "broadcast_object_list."
)
ALIKE = 8  # steps with the same random numbers
OWN_SAMPLER = (
    "Keep the DistributedSampler of each loader in a variable of its own, and call set_epoch of that for training."
)
SHUFFLED = (
    "Pass shuffle=True to the DataLoader of the training samples. A sampler or an IterableDataset of your own shuffles in its "
    "__iter__(), differently in each epoch."
)
OWN_DRAWS = (
    "If the program draws the samples at random, seed each rank differently: torch.manual_seed(SEED + rank). If it has them "
    "in memory, give each rank a part of its own, such as data[rank::world_size]."
)
SAME_ORDER = (
    "Draw the order from a generator that has the same seed on all ranks, such as "
    "torch.Generator().manual_seed(SEED + epoch) or random.Random(SEED + epoch)."
)


def _of_samples(
    why: str, fix: str, after: tuple[Rule, ...] = (), hint: bool = False, origin: str = ""
) -> "Makes[[Run]]":
    after = (no_group, wrong_group, *after)
    return rule(why=why, fix=fix, needs=(Drawn,), after=after, hint=hint, anywhere=True, origin=origin)


@_of_samples(
    why="The model is evaluated on samples that it was trained on, so the metric is too good.",
    fix="Split the data set with the same seed on all ranks: random_split(..., generator=torch.Generator().manual_seed(SEED)).",
    origin="loader",
)
def leak(run: Run) -> Said:
    """Some rank has trained on samples of the evaluation."""
    trained = {key for process in run.ranks for epoch in process.epochs for key in epoch}
    began: dict[Key, float] = {}
    for process in run.ranks:
        for step in process.steps:
            for key in step.keys:
                began[key] = min(step.seconds, began.get(key, step.seconds))
    passes = [
        set(part)
        for process in run.ranks
        for seconds, phase in process.evaluated
        for loader, keys in phase.items()
        if loader or not _collects(keys, seconds, began)
        for part in ([keys] if loader else _halves(keys, trained))
    ]
    if any(trained.isdisjoint(each) for each in passes):
        # others may measure the training set, or fill a memory bank from it
        passes = [each for each in passes if not each <= trained]
    elif run.asked is None:
        # Each pass scores the whole training set, or the part of its rank, to choose samples, or shows one training batch.
        batch = max((len(step.keys) for process in run.ranks for step in process.steps), default=0)
        passes = [each for each in passes if not each >= trained and not (len(each) <= batch and each <= trained)]
    evaluated = {key for each in passes for key in each}
    both = len(trained & evaluated)
    indexed = any(key[0] != "content" for key in evaluated)  # windows of a text can be equal by chance
    if both > (0.02 if indexed else 0.2) * len(evaluated) and (indexed or not _repeats(run)):
        seen = f"{both:,} of the {len(evaluated):,} evaluated samples are training samples of a rank"
        yield _by_draw(run, Seen(seen, run.where(Evaluated)))


def _halves(keys: list[Key], trained: set[Key]) -> list[list[Key]]:
    """The samples of an evaluation; in two parts if it measures both the training and the validation set, one after the other."""
    halves = [keys[: len(keys) // 2], keys[len(keys) // 2 :]]
    low, high = sorted(sum(key in trained for key in half) / max(1, len(half)) for half in halves)
    return halves if low < 0.02 and high > 0.98 else [keys]


def _repeats(run: Run) -> bool:
    """Whether many samples are equal, as short windows of a text are, so that content does not identify them."""
    passes = [keys for process in run.ranks for keys in (*process.epochs[:1], *process.evaluations[:1])]
    return any(len(set(keys)) < 0.95 * len(keys) for keys in passes)


def _collects(keys: list[Key], seconds: float, began: dict[Key, float]) -> bool:
    """Whether the program trains on samples of an evaluation only later, as on the games that a policy has just played."""
    later = sum(began.get(key, 0.0) > seconds for key in set(keys))
    return later > 0.2 * len(set(keys))


@_of_samples(
    why="Every rank works through the same samples, so more GPUs cost more but do not shorten an epoch.",
    fix="Pass a DistributedSampler to the DataLoader (sampler=..., without shuffle=True): each rank then gets a different part.",
    origin="dealt undivided of-rank:rank undealt loader",
)
def same_samples(run: Run) -> Said:
    """Two ranks train on the same samples."""
    # A sampler does not help if the data set does not use the index.
    indexed = any(key[0] != "content" for process in run.trained for step in process.steps for key in step.keys)
    fix = "" if indexed and any(run.all(LoaderStarted)) else OWN_DRAWS
    return (replace(seen, fix=seen.fix or fix) for seen in if_first("same", _overlaps(run)))


@_of_samples(
    why="Samples that two ranks train on count twice, and others not at all.",
    after=(same_samples, epochs_of_ranks),
    fix="Split and shuffle the data set with the same seed on all ranks, and let a DistributedSampler distribute it.",
    origin="call:DataLoaderConfiguration.use_seedable_sampler call:set_seed.device_specific dealt of-rank:seed loader reseeded",
)
def shares_overlap(run: Run) -> Said:
    """Two ranks share some of their samples."""
    found = [_by_draw(run, seen) for seen in if_first("some", _overlaps(run))] if not endless(run) else []
    return found or _different_subsets(run)


@shares_overlap.also(WHOLE, instead_of=(crash, ended_early))
def different_subsets(run: Run) -> Said:
    """The run fails, and before the ranks have divided different lists of samples: their tensors have different sizes then."""
    return _different_subsets(run) if run.failed else []


def _different_subsets(run: Run) -> list[Seen]:
    drawn = None if run.divided else unequal_subset(run)
    here = [each for each in run.all(Drawn) if drawn and (each.name, each.where) == (DATA_SET, drawn.where)]
    whole = any(each.of == run.nproc for each in here)
    return [Seen(_lists(drawn), drawn.where, fix=SAME_SUBSET, origin="listed here")] if drawn and whole else []


def _lists(drawn: Drawn) -> str:
    return f"the DistributedSampler at {drawn.where} divides a Subset whose indices differ between the ranks"


def _by_draw(run: Run, seen: Seen) -> Seen:
    """Name the random split or order that differs between the ranks, if that explains what was seen."""
    drawn = unequal_draw(run)
    stream = next((each.source for each in run.all(LoaderStarted) if each.source), "")
    if drawn is None:
        return Seen(seen.text, stream, origin="stream") if stream and not seen.origin else seen
    if drawn.name == SUBSET:
        of_split = unequal_split(run)
        return Seen(
            f"{seen.text}: {_lists(drawn)}",
            of_split or drawn.where,
            fix=leak.fix if of_split else SAME_SUBSET,
            origin="" if of_split else "listed here",
        )
    split = drawn.name == "random_split"
    what = "makes different parts on each rank" if split else "returns a different result on each rank"
    return Seen(
        f"{seen.text}: {drawn.name}() at {drawn.where} {what}",
        drawn.where,
        fix=leak.fix if split else SAME_ORDER,
        origin="here",
    )


@_of_samples(
    why="Each rank takes its part of a different order: the model sees some samples twice and others not at all, and the "
    "results are put back in the places of other samples.",
    fix="Draw the order on one rank and send it with broadcast(), or draw it from a generator that has the same seed on all "
    "ranks.",
)
def gathered_order(run: Run) -> Said:
    """In a forward pass, the ranks gather their inputs, draw different orders of all of them, and gather the results."""
    ranks = [list(orders(process, run.nproc)) for process in run.trained] if not run.divided else []
    together = list(zip(*ranks, strict=False)) if len(ranks) > 1 else []
    alike = all(each.where == orders[0].where and each.of == orders[0].of for orders in together for each in orders)
    if len(together) > 1 and alike and all(len({each.result for each in orders}) > 1 for orders in together):
        first = together[0][0]
        seen = f"the ranks gather {first.size} samples, and {first.name}() at {first.where} draws a different order on each rank"
        yield Seen(seen, first.where)


def _overlaps(run: Run) -> Iterator[tuple[str, Seen]]:
    """Ranks with the "same" or "some" common samples, per epoch or, without a loader that shows epochs, per step."""
    ranks = run.trained
    where = ranks[0].loader_where if ranks else ""
    parts = [run.parts_of(process) for process in ranks] if run.divided else []  # together they have one model
    pairs = [
        (one, two)
        for one, two in combinations(range(len(ranks)), 2)
        if not parts or not (ranks[two].rank in parts[one] or slices(ranks[one], ranks[two]))
    ]
    names = {(one, two): f"ranks {rank_of(ranks, one)} and {rank_of(ranks, two)}" for one, two in pairs}
    by_epoch = all(each.forward and each.forward.loader for process in ranks for each in process.backwards)
    drawn = "" if by_epoch else "seed dealt"  # the program draws samples itself, or a library iterates over its stream
    for number, together in enumerate(zip(*(process.epochs for process in ranks), strict=False) if by_epoch else (), 1):
        sets = [set(keys) for keys in together]
        batch = max(len(process.steps[0].keys) for process in ranks)
        again = any(len(part) < 0.97 * len(keys) for part, keys in zip(sets, together, strict=True))
        for one, two in pairs if min(map(len, sets)) >= 4 else ():
            both, smaller = len(sets[one] & sets[two]), min(len(sets[one]), len(sets[two]))
            if both >= 0.95 * smaller and not (again and different_steps(ranks[one], ranks[two])):
                yield "same", Seen(f"{names[one, two]} saw the same {both:,} samples in epoch {number}", where)
            elif both <= batch and in_a_last_batch(sets[one] & sets[two], together[one], together[two], batch):
                continue  # Accelerate repeats a batch so that all ranks have the same number
            elif both > run.nproc - 1 and both > 0.03 * smaller and not again:  # drawn with replacement: no mistake
                text = f"{names[one, two]} share {both:,} of their {smaller:,} samples in epoch {number}"
                yield "some", Seen(text, where)
    repeats = any(len(set(keys)) < 0.97 * len(keys) for process in ranks for keys in process.epochs[:1])
    for one, two in pairs:
        steps = zip(ranks[one].steps, ranks[two].steps, strict=False)
        keys = [(set(here.keys), set(there.keys)) for here, there in steps]
        if not by_epoch:
            where = _drawn_where(ranks[one], set().union(*(here & there for here, there in keys))) or where
        fractions = [len(here & there) / min(len(here), len(there)) for here, there in keys if here and there]
        same, mean = sum(each >= 0.95 for each in fractions), sum(fractions) / max(len(fractions), 1)
        if by_epoch and repeats and different_steps(ranks[one], ranks[two]):
            continue  # a sampler that repeats samples, so that each rank changes them in its own way, or draws with replacement
        if _lose_differently(ranks[one], ranks[two]):
            continue
        if same > len(fractions) / 2:
            text = f"at {same} of {len(fractions)} steps {names[one, two]} train on the same samples"
            yield "same", Seen(text, where, origin=drawn)
        elif mean > 0.1 and not _meets_equal_samples(ranks[one]):
            text = f"at each step {names[one, two]} share {mean:.0%} of their samples"
            yield "some", Seen(text, where, origin=drawn)
        elif not by_epoch and not plays(ranks[one]) and (shares := shared(ranks[one], ranks[two], len(ranks))):
            both, each = shares
            text = f"{names[one, two]} share {both:,} of the first {each:,} samples that each of them trains on"
            yield "some", Seen(text, where, origin=f"{drawn} reseeded")


def _lose_differently(one: Process, other: Process) -> bool:
    """Whether ranks with the same input in all steps, such as a whole graph, have different losses: of nodes of their own."""
    inputs = {frozenset(step.keys) for process in (one, other) for step in process.steps}
    losses = [[each.loss for each in process.backwards[:1]] for process in (one, other)]
    return len(inputs) == 1 and losses[0] != losses[1]


def _meets_equal_samples(process: Process) -> bool:
    """Whether ranks share some samples by chance: batches contain equal ones, or the samples are the states of a game."""
    different, all_of_them = (sum(len(kind(each.keys)) for each in process.steps) for kind in (set, list))
    return different < 0.97 * all_of_them or plays(process)


def _drawn_where(process: Process, shared: set[Key]) -> str:
    """The line of the first forward pass that sees only these samples."""
    for backward in process.backwards:
        for forward in [backward.forward, *backward.others]:
            if forward and forward.keys and shared.issuperset(forward.names(process.identity)):
                return forward.where
    return ""


@rule(
    why="The model cannot learn from samples that no rank sees.",
    fix="Give DistributedSampler the whole training set, with the number of processes and the rank of the group.",
    needs=(Drawn,),
    after=(no_group, wrong_group, same_samples, shares_overlap),
    origin="loader",
)
def samples_missed(run: Run) -> Said:
    """In an epoch, samples of the data set are trained on by no rank."""
    ranks = [] if run.divided else run.trained
    evaluated = {key for process in ranks for phase in process.evaluations for key in phase}
    step = sum(len(process.steps[0].keys) for process in ranks) * run.accumulate
    epochs = zip(*(process.epochs for process in ranks), strict=False) if len(ranks) > 1 else ()
    for number, together in enumerate(epochs, 1):
        trained = set().union(*together)
        data_sets = {key[:2] for key in trained}
        kind, length = next(iter(data_sets)) if len(data_sets) == 1 else ("content", 0)
        if kind == "content":
            continue  # the samples are not those of one data set
        size = int(str(length))
        left = size - len(trained | {key for key in evaluated if key[:2] in data_sets})
        if left >= max(step, run.nproc) + run.nproc and not stopped_early(ranks[0], number, run.accumulate):
            seen = f"{left:,} of {size:,} samples are seen by no rank in epoch {number}"
            yield _by_draw(run, Seen(seen, ranks[0].loader_where))
            return


@_of_samples(
    why="A part of the data is not used in an epoch, and the epochs have fewer steps than planned.",
    fix="Divide the data set once. Trainer, Accelerate and Lightning give each process its part themselves, so pass them a "
    "loader without DistributedSampler. Give DistributedSampler the whole data set, not a part.",
    after=(same_samples, shares_overlap, samples_missed),
    origin="loader call:DistributedSampler",
)
def data_divided_twice(run: Run) -> Said:
    """All ranks together train on 1/N of the data set in each epoch, where N is the number of ranks."""
    ranks = [] if run.divided or len(run.trained) < 2 else run.trained
    epochs = list(zip(*(process.epochs for process in ranks), strict=False))
    epochs = epochs[:-1] if run.cut else epochs
    batch = sum(len(process.steps[0].keys) for process in ranks)
    sizes = set()
    for number, together in enumerate(epochs, 1):
        trained = set().union(*together)
        data_sets = {key[:2] for key in trained}
        kind, length = next(iter(data_sets)) if len(data_sets) == 1 else ("content", 0)
        size = int(str(length))
        share = size / len(ranks)
        if kind == "content" or size < 4 * batch or not share - batch < len(trained) <= share + len(ranks):
            return
        again = any(len(set(own)) < 0.9 * len(own) for own in together)  # samples are drawn with replacement
        if again or stopped_early(ranks[0], number, run.accumulate):
            return
        sizes.add((len(trained), size))
    if len(epochs) > 1:
        seen, size = min(sizes)
        yield Seen(
            f"in each epoch the {len(ranks)} ranks train on {seen:,} of {size:,} samples together",
            ranks[0].loader_where,
        )


@data_divided_twice.also(WHOLE, after=(no_group, wrong_group, same_samples, shares_overlap, samples_missed))
def own_part_divided(run: Run) -> Said:
    """Each rank has a data set of its own, and trains on 1/N of it in each epoch."""
    own = all(process.identity == "rows" for process in run.trained)
    own = own and not any(run.all(StatePrepared))  # what prepare_data() sets on one rank may change the samples there
    if own and (share := share_of_each(run)):
        text = f"each rank has a data set of its own with {share[1]:,} samples, and trains on {share[0]:,} of them in each epoch"
        yield Seen(text, run.trained[0].loader_where, origin="share loader")


@data_divided_twice.also((WHOLE, COMPARED), after=(no_group, wrong_group, same_samples, shares_overlap, samples_missed))
def smaller_data_set_divided(run: Run, compared: Compared) -> Said:
    """Each rank trains on 1/N of a data set in each epoch, and the loader of one process has N * N times as many batches."""
    share, alone = share_of_each(run), compared.single.trained[:1]
    ours, theirs = (next(map(batches, ranks), None) for ranks in (run.trained[:1], alone))
    if share and ours and theirs and abs(theirs / ours / run.nproc**2 - 1) < 0.1:
        text = f"an epoch of one process has {theirs:,} batches, and that of each of {run.nproc} ranks {ours:,}"
        seen = f"{text}: each rank trains on {share[0]:,} of {share[1]:,} samples"
        yield Seen(seen, run.trained[0].loader_where, origin="share loader")


@data_divided_twice.also(
    (WHOLE, COMPARED), needs=(Drawn,), after=(no_group, wrong_group, same_samples, shares_overlap, samples_missed)
)
def part_divided_again(run: Run, compared: Compared) -> Said:
    """A DistributedSampler divides a data set among all ranks that is only the part of a rank: with one process it is larger."""
    ranks = [dict(_data_sets(process)) for process in run.trained]
    for place, alone in (each for process in compared.single.trained for each in _data_sets(process)):
        ours = [found[place] for found in ranks if place in found]
        divided = len(ours) == len(ranks) > 1 and not run.divided and all(each.of == len(ranks) for each in ours)
        parts = abs(sum(each.size for each in ours) - alone.size) < len(ranks) and all(
            each.size < alone.size for each in ours
        )
        if divided and parts:
            seen = f"the data set of a rank has only {ours[0].size:,} of {alone.size:,} samples"
            origin = "share" if alone.where else "call:setup_dataloaders call:Trainer.use_distributed_sampler|Trainer"
            yield Seen(f"{seen}, and DistributedSampler divides it by {len(ranks)} again", alone.where, origin=origin)
            return


def _data_sets(process: Process) -> Iterator[tuple[tuple[str, int], Drawn]]:
    """The data sets that a DistributedSampler divides, each with its line and its number there."""
    times: Counter[str] = Counter()
    for event in process.of(Drawn):
        if event.name == DATA_SET:
            times[event.where] += 1
            yield (event.where, times[event.where]), event


@_of_samples(
    why="With the same batches in every epoch the model learns less from the same data.",
    fix="Call set_epoch(epoch) of the DistributedSampler at the start of each epoch; with one process, use shuffle=True.",
    after=(same_samples, shares_overlap, samples_missed, workers_kept, epochs_of_ranks),
    origin="loader:order",
)
def same_order(run: Run) -> Said:
    """Two epochs have the same samples in the same order."""
    for process in run.trained[:1]:
        epochs = process.epochs
        whole = epochs and len(epochs[0]) <= len(process.steps[0].keys)  # each step trains on all samples
        same = len(epochs) > 1 and len(epochs[0]) > 8 and epochs[0] == epochs[1] and len(set(epochs[0])) > 1
        if same and not whole and not shuffled_below(run):
            yield _same_orders(run, process)
            return
        if beside := beside_main(process) or kept_batches(process):
            yield beside


def _same_orders(run: Run, process: Process) -> Seen:
    seen = "epoch 2 has the same samples in the same order as epoch 1"
    if calls := [event.epoch for event in process.of(EpochSet)]:
        seen += f"; set_epoch was called with {calls}"
        loader = process.steps[0].loader
        if loader and loader[0] in {each.loader for each in process.of(OtherSamplerSet)}:
            return Seen(f"{seen} on the DistributedSampler of a different loader", process.data_where, fix=OWN_SAMPLER)
        return Seen(seen, process.data_where)
    sampled = run.nproc > 1 and any(_data_sets(process))
    seen += "; set_epoch was never called" if sampled else ""
    return Seen(seen, process.loop_where, fix="" if sampled else SHUFFLED, origin="loader:uncalled")


@_of_samples(
    why="The model learns these few samples only, however long it trains.",
    fix="Begin the pass over the DataLoader before the loop over the steps: each call of a generator function begins anew.",
    origin="passed:generator",
)
def same_batch(run: Run) -> Said:
    """Each step begins a new pass over the loader and trains on its first batches."""
    for process in run.trained[:1]:
        steps, length = process.steps, batches(process) or 0
        anew = 3 <= len(steps) == len(process.epochs) and all(each.keys == steps[0].keys for each in steps)
        if anew and length > len(steps[0].backwards):
            first = next(each.forward.loader for each in process.backwards if each.forward and each.forward.loader)
            begun = (each.where for each in process.of(LoaderStarted) if (each.loader, each.iteration) == first)
            seen = f"all {len(steps)} steps train on the same {plural(len(steps[0].keys), 'sample')} of the loader"
            yield Seen(seen, next(begun, ""))


@_of_samples(
    why="Loading a batch that is not used costs time, and starting the workers of the loader costs more.",
    fix="Use every batch of the DataLoader, or take a single sample from the data set itself.",
    hint=True,
    origin="call:next",
)
def batch_wasted(run: Run) -> Said:
    """More batches are loaded than used."""
    if run.asked is None and any(run.all(TrainerFit)):
        return  # Lightning itself loads batches ahead
    ranks = run.trained if len(run.trained) > 1 else []
    if any(process.backwards and not process.first(BatchLoaded) for process in ranks):
        return  # another rank loads for it, as the dispatcher of Accelerate does
    for process in ranks:
        left = unused_batches(process)
        if left > 1:
            yield Seen(f"{plural(left, 'batch')} are loaded but not used")
            return


@_of_samples(
    why="All ranks draw the same random numbers, so they apply the same dropout and augmentation.",
    fix="Seed each rank differently before the training: torch.manual_seed(SEED + rank). Draw what must be equal on all ranks, "
    "such as an order of the samples, from a generator of its own.",
    hint=True,
)
def same_random(run: Run) -> Said:
    """The steps draw the same random numbers on all ranks."""
    ranks = run.trained
    together = list(zip(*([each.random for each in process.backwards] for process in ranks), strict=False))
    # Later, only one rank may draw further numbers, for example in an evaluation.
    alike = len(list(takewhile(lambda states: len(set(states)) == 1, together)))
    if len(ranks) > 1 and ranks[0].draws and together and alike >= min(len(together), ALIKE):
        when = "at each step" if alike == len(together) else f"in the first {alike} steps"
        yield Seen(f"{when} all ranks draw the same random numbers", ranks[0].data_where)


@rule(
    why="mp.spawn() passes tensors in shared memory, so what one process changes in place changes for all, and a change that "
    "each process makes is made several times.",
    fix="Compute a new tensor, x = (x - mean) / std, or copy it first with clone(); or change it before mp.spawn().",
    needs=(SharedChanged,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def shared_changed(run: Run) -> Said:
    """Several processes change the same argument of mp.spawn() in place."""
    names = [{event.name for event in process.of(SharedChanged)} for process in run.trained]
    for name in sorted(set.intersection(*names)) if len(names) > 1 else ():
        seen = f"each of {len(names)} processes changes `{name}` in place, which mp.spawn() shares between them"
        yield Seen(seen, next(run.all(SharedChanged)).where, origin=f"inplace:{name} call:spawn")
        return
