"""The samples of its data set that a rank chooses and trains on in an epoch, their order, and the batches that it repeats."""

import math
from collections import Counter
from collections.abc import Iterator

from workshop.check.evidence.events import (
    SUBSET,
    Backward,
    BatchLoaded,
    Collective,
    Drawn,
    Evaluated,
    Key,
    Loader,
    LoaderStarted,
)
from workshop.check.evidence.misuses import PassEnded, StreamEndless
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE
from workshop.check.rules.rule import Seen

SOME = 64  # samples of a rank without a repetition, after which their content identifies them
ITERATE = (
    "Iterate over the DataLoader again in each epoch, after set_epoch(). itertools.cycle and list() keep the batches of the "
    "first pass."
)


def share_of_each(run: Run) -> tuple[int, int] | None:
    """How many samples each rank trains on in an epoch, and the size of its data set; None unless these are 1/N of them.

    N is the number of ranks. The data sets of the ranks may be the same one or different ones of one size.
    """
    ranks = [] if run.divided or run.cut or len(run.trained) < 2 else run.trained
    batch = sum(len(process.steps[0].keys) for process in ranks)
    shares: set[tuple[int, int]] = set()
    for process in ranks:
        epochs: dict[object, set[Key]] = {}
        for forward in (each.forward for each in process.backwards if each.forward):
            epochs.setdefault(forward.loader, set()).update(forward.keys)
        for keys in epochs.values():
            kind, length = min(key[:2] for key in keys) if keys else ("content", 0)
            size, same = int(str(length)), len({key[:2] for key in keys}) == 1
            share = size / len(ranks)
            if kind == "content" or not same or size < 4 * batch or not share - batch < len(keys) <= share + len(ranks):
                return None
            shares.add((len(keys), size))
        if len(epochs) < 2 or stopped_early(process, 1, run.accumulate):
            return None
    return min(shares, default=None)


def endless(run: Run) -> bool:
    """Whether the ranks train on endless streams: each may go through all samples again and again, in an order of its own."""
    for process in run.trained[:1]:
        streams = {event.loader for event in process.of(StreamEndless)}
        forwards = [each.forward for each in process.backwards if each.forward]
        return bool(forwards) and all(each.loader and each.loader[0] in streams for each in forwards)
    return False


def batches(process: Process) -> int | None:
    """The length of the loader of the first training step; None: it is unknown."""
    first = next((each.forward.loader for each in process.backwards if each.forward and each.forward.loader), None)
    lengths = {(event.loader, event.iteration): event.length for event in process.of(LoaderStarted)}
    return lengths.get(first) if first else None


def stopped_early(process: Process, number: int, accumulate: int) -> bool:
    """Whether the program left the loader before its end on purpose, so that no sample was forgotten."""
    loaders = [each.forward.loader for each in process.backwards if each.forward and each.forward.loader]
    lengths = {(event.loader, event.iteration): event.length or 0 for event in process.of(LoaderStarted)}
    here = list(dict.fromkeys(loaders))[number - 1 : number]
    return any(loaders.count(loader) < lengths.get(loader, 0) - accumulate for loader in here)


def orders(process: Process, nproc: int) -> Iterator[Drawn]:
    """The orders of all gathered inputs that a rank draws in a forward pass, if it gathers the results there too."""
    inputs = {each.forward.shape for each in process.backwards if each.forward}
    gathered: Collective | None = None
    drawn: Drawn | None = None
    for _, event in process.events:
        if isinstance(event, Backward):
            gathered = drawn = None
        elif isinstance(event, Drawn):
            rows = gathered.shape[0] * nproc if gathered and gathered.shape else 0
            drawn = event if event.size == rows else None
        elif isinstance(event, Collective):
            gathers = event.inside and event.name.startswith("all_gather") and bool(event.shape)
            if (
                drawn
                and gathers
                and gathered
                and event.shape
                and gathered.shape
                and event.shape[0] == gathered.shape[0]
            ):
                yield drawn
            drawn = None
            gathered = event if gathers and event.shape and event.shape[1:] in inputs else None


def slices(one: Process, two: Process) -> bool:
    """Whether two ranks that have parts of a model get other losses: each may take its slice of a global batch."""
    losses = [(here.loss, there.loss) for here, there in zip(one.backwards, two.backwards, strict=False)]
    known = [(here, there) for here, there in losses if here is not None and there is not None]
    return bool(known) and sum(not math.isclose(*pair, rel_tol=CLOSE) for pair in known) > len(known) / 2


def shared(one: Process, two: Process, ranks: int) -> tuple[int, int] | None:
    """How many of their samples two ranks share, and of how many, if neither has met a sample twice until then.

    Ranks that draw with replacement meet some twice. If many samples are shared although none is repeated, each rank goes
    through an order of its own. They must share some soon: in the next epoch, a rank may get the samples of another one.
    """
    samples: tuple[dict[Key, None], dict[Key, None]] = {}, {}
    for steps in zip(one.steps, two.steps, strict=False):
        new = [step.keys for step in steps]
        if any(
            len({*keys}) < len(keys) or not known.keys().isdisjoint(keys)
            for known, keys in zip(samples, new, strict=True)
        ):
            break
        for known, keys in zip(samples, new, strict=True):
            known.update(dict.fromkeys(keys))
    mine, theirs = map(list, samples)
    each = min(len(mine), len(theirs))
    both, soon = (len({*mine[:part]} & {*theirs[:part]}) for part in (each, each // ranks))
    return (both, each) if each >= SOME and both > 0.1 * each and soon > 0.03 * each / ranks else None


def different_steps(one: Process, two: Process) -> bool:
    """Whether two ranks train on different samples, or in a different order, in most steps."""
    steps = [here.keys == there.keys for here, there in zip(one.steps, two.steps, strict=False)]
    return sum(steps) < len(steps) / 2


def in_a_last_batch(common: set[Key], one: list[Key], two: list[Key], batch: int) -> bool:
    """Whether common samples are in the last batch of one of two ranks."""
    return any(common.issubset(keys[-batch:]) for keys in (one, two))


def unused_batches(process: Process) -> int:
    """How many batches more a process has loaded than used, without those of loaders that have another purpose."""
    forwards = [*(each.forward for each in process.backwards), *(each.forward for each in process.of(Evaluated))]
    used = {each.loader[0] for each in forwards if each and each.loader}
    # Such as those of a preparation.
    others = sum(each.batches for each in process.of(PassEnded) if each.loader not in used)
    return len(process.of(BatchLoaded)) - others - len(forwards)


def beside_main(process: Process) -> Seen | None:
    """Two passes over a loader of training samples, such as that of the labelled ones, in the same order."""
    trained = {number for number, _ in process.passes}
    started = {each.loader: each.where for each in process.of(LoaderStarted)}
    passes: dict[int, PassEnded] = {}
    for event in process.of(PassEnded):
        if event.loader in trained and (event.loader, event.iteration) not in process.passes:
            continue  # an evaluation of the training samples
        first = passes.setdefault(event.loader, event)
        alike = event is not first and event.order == first.order is not None and event.batches == first.batches
        if alike and event.loader in trained and event.batches > 1:
            seen = "two passes over a loader of training samples have the same samples in the same order"
            return Seen(seen, started.get(event.loader, ""), origin="here")
    return None


def kept_batches(process: Process) -> Seen | None:
    """The training goes on with the batches of the only pass over each loader."""
    started = process.of(LoaderStarted)
    used = [each for each in started if (each.loader, each.iteration) in process.passes]
    forwards = [each.forward for each in process.backwards if each.forward and each.forward.rows]
    length = sum(each.length or 0 for each in used)
    if (
        not used
        or any(each.iteration > 1 or not each.length for each in used)
        or len(forwards) < 2 * length
        or length < 4
    ):
        return None
    first, later = ({frozenset(each.rows) for each in part} for part in (forwards[:length], forwards[length:]))
    if len(first) == length and later <= first:
        seen = f"after the only pass over each loader, the program trains on the same {length} batches again"
        return Seen(seen, used[0].where, fix=ITERATE, origin="call:cycle here")
    return None


def shuffled_below(run: Run) -> bool:
    """Whether epoch 2 has the contents of epoch 1 in a different order: the program shuffles the data set itself.

    If each epoch has a loader of its own, other contents are enough: the index of a sample says nothing in another data set.
    """
    ranks = []
    for process in run.trained:
        contents: dict[Loader, list[Key]] = {}
        for forward in (backward.forward for backward in process.backwards):
            if forward and forward.loader:
                contents.setdefault(forward.loader, []).extend(forward.rows)
        ranks.append([*contents.values()][:2])
        loaders = [number for number, _ in [*contents][:2]]
    if not ranks or any(len(passes) < 2 for passes in ranks) or all(one == two for one, two in ranks):
        return False
    same = [here == there for one, two in ranks for here, there in zip(one, two, strict=False)]
    if len(set(loaders)) == 2 and sum(same) < 0.1 * len(same):
        return True
    first, second = (set().union(*(passes[number] for passes in ranks)) for number in (0, 1))
    return len(first & second) > 0.9 * len(first) > 0


def unequal_draw(run: Run) -> Drawn | None:
    """The first draw before the training whose result differs between two ranks, although they chose from the same values."""
    ranks = [list(_numbered(process)) for process in run.trained]
    for other in map(dict, ranks[1:]):
        for place, drawn in ranks[0]:
            theirs = other.get(place)
            if theirs and theirs.of == drawn.of and theirs.result != drawn.result:
                return drawn
    return unequal_subset(run)


def unequal_subset(run: Run) -> Drawn | None:
    """The first Subset of a DistributedSampler, such as that of the most useful samples, that differs between two ranks."""
    subsets = [[each for each in process.of(Drawn) if each.name == SUBSET] for process in run.trained]
    for together in zip(*subsets, strict=False):
        if len({each.where for each in together}) == 1 < len({each.result for each in together}):
            first: Drawn = together[0]
            return first
    return None


def unequal_split(run: Run) -> str:
    """The line of a random_split() that makes different parts on two ranks."""
    splits = [[each for each in process.of(Drawn) if each.name == "random_split"] for process in run.trained]
    apart = [each[0].where for each in zip(*splits, strict=False) if len({drawn.result for drawn in each}) > 1]
    return apart[0] if apart else ""


def _numbered(process: Process) -> Iterator[tuple[tuple[str, int], Drawn]]:
    """The draws before the first backward pass, each with its line and its number there.

    A choice among fewer values than an epoch has batches, such as that of the masked patches, does not divide a data set.
    """
    loader = next((each.forward.loader for each in process.backwards if each.forward), None)
    batches = sum(bool(each.forward and each.forward.loader == loader) for each in process.backwards)
    times: Counter[str] = Counter()
    for _, event in process.events:
        if isinstance(event, Backward):
            return
        if isinstance(event, Drawn):
            times[event.where] += 1
            if event.size >= batches:
                yield (event.where, times[event.where]), event


def plays(process: Process) -> bool:
    """Whether a program without a loader trains on samples for which the model has decided something before, as in a game."""
    seen: set[Key] = set()
    latest: list[list[Key]] = []  # since the last backward pass
    trained: set[Key] = set()
    played = 0
    for _, event in process.events:
        if isinstance(event, Evaluated):
            latest += [event.forward.rows] if event.forward.loader is None else []
        elif isinstance(event, Backward) and event.forward and event.forward.loader is None:
            # A teacher, or the reference of a policy, gets the batch of the step as it is.
            seen.update(key for rows in latest if rows != event.forward.rows for key in rows)
            latest = []
            # A model with several heads sees features there, which change with each step.
            inputs = [set(each.rows) - trained for each in (event.forward, *event.others) if each.loader is None]
            new = max(inputs, key=lambda rows: len(rows & seen))
            played += len(new & seen)
            trained |= new
    return played > 0.1 * len(trained) > 0
