"""Whether all ranks turn the same data into the same inputs of the model."""

from collections.abc import Iterator

from workshop.check.evidence.events import BY_HASH, Collective, EncodersSeen, Evaluated, Saved, StepTaken
from workshop.check.evidence.misuses import BuffersReplaced
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules.gradients import OF_A_RANK
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural

SORTED = (
    "Number the words in an order that all processes have, such as that of sorted(words), or number them on rank 0 and send the "
    "result to the others with broadcast_object_list. Save the numbers in the checkpoint."
)


@rule(
    why="The ranks train one model, but the same text or value becomes a different input on each rank.",
    fix="Compute vocabularies and statistics from the whole data set on all ranks, or on rank 0 and send them to the others with "
    "broadcast_object_list; sums of values can be added up with all_reduce.",
    needs=(EncodersSeen,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def encoded_differently(run: Run) -> Said:
    """A vocabulary, or the mean and the deviation of the inputs, differs between the ranks and does not change."""
    ranks = [process.of(EncodersSeen) for process in run.trained]
    if len(ranks) < 2 or not all(ranks) or run.divided:
        return
    for name, seen in (*_vocabularies(ranks), *_statistics(ranks)):
        by_hash = ranks[0][0].vocabularies.get(name, (0, 0))[1] >= BY_HASH
        text = f"`{name}` {seen}" if by_hash else f"the ranks have different values in `{name}`: {seen}"
        yield Seen(text, ranks[0][0].where, fix=SORTED if by_hash else "", origin=f"encoder:{name}")
        return


def _vocabularies(ranks: list[list[EncodersSeen]]) -> Iterator[tuple[str, str]]:
    for name, first in ranks[0][0].vocabularies.items():
        others = [events[0].vocabularies.get(name) for events in ranks[1:]]
        steady = all(
            event.vocabularies.get(name) == events[0].vocabularies.get(name) for events in ranks for event in events
        )
        other = next((each for each in others if each and each != first), None)
        if steady and other:
            if first[1] >= BY_HASH:
                yield (
                    name,
                    f"numbers {first[0]:,} words in the order of a set, which is a different one in each process",
                )
                continue
            yield name, f"{first[0]:,} and {other[0]:,} words with numbers that do not agree"


def _statistics(ranks: list[list[EncodersSeen]]) -> Iterator[tuple[str, str]]:
    """Statistics that differ; one alone can be anything, so at least two of the same owner must differ."""
    if min(map(len, ranks)) < 2:
        return
    found: dict[str, list[tuple[str, str]]] = {}
    for name, first in ranks[0][0].statistics.items():
        values = [[event.statistics.get(name) for event in events] for events in ranks]
        steady = all(each == own[0] and each for own in values for each in own)
        other = next((own[0] for own in values[1:] if own[0] and _apart(first, own[0])), None)
        if steady and other:
            text = f"{first[0]:.4g} and {other[0]:.4g}"
            found.setdefault(name.rpartition(".")[0], []).append((name, text))
    yield from (pairs[0] for pairs in found.values() if len(pairs) > 1)


def _apart(one: list[float], other: list[float]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and any(abs(a - b) > CLOSE * max(abs(a), abs(b)) for a, b in pairs)


@rule(
    why="DistributedDataParallel sends the buffers of rank 0 to all ranks, so the model uses statistics of the samples of rank 0 "
    "only, and they change with the number of processes.",
    fix="Compute them from the whole data set on all ranks, or add up sums and counts with all_reduce before you divide.",
    needs=(BuffersReplaced,),
    after=(no_group, wrong_group, encoded_differently),
    anywhere=True,
)
def buffer_of_rank_0(run: Run) -> Said:
    """Ranks whose models are otherwise equal have computed different buffers before DistributedDataParallel gets the model."""
    for first, *others in zip(*(process.of(BuffersReplaced) for process in run.trained), strict=False):
        for other in others:
            if other.names != first.names or difference(first.weights, other.weights) > CLOSE:
                return  # the ranks have made the models at random
            for name, mine, theirs in zip(first.names, first.buffers, other.buffers, strict=True):
                if difference([mine], [theirs]) > CLOSE and not OF_A_RANK.search(name):
                    seen = (
                        f"the ranks have different values in the buffer `{name}`, and all of them get those of rank 0"
                    )
                    yield Seen(seen, first.where, origin=f"encoder:{name}")
                    return


@rule(
    why="Each rank then evaluates and saves a model with statistics of its own samples only.",
    fix="After the pass, average running_mean and running_var over the ranks with all_reduce, or broadcast the buffers of "
    "rank 0; or let all ranks see the same samples in this pass.",
    after=(no_group, wrong_group),
    anywhere=True,
)
def statistics_of_one_rank(run: Run) -> Said:
    """The ranks renew the statistics of BatchNorm from different samples, and exchange nothing before they use them."""
    refreshed = [_refreshed(process) for process in run.trained]
    if len(refreshed) < 2 or run.divided or run.failed or not all(samples for samples, _ in refreshed):
        return
    first, second = (set(samples) for samples, _ in refreshed[:2])
    if len(first & second) < 0.5 * min(len(first), len(second)):
        seen = f"{plural(len(first), 'sample')} of its own"
        yield Seen(
            f"each rank recomputes the statistics of BatchNorm from {seen}, and no collective follows", refreshed[0][1]
        )


def _refreshed(process: Process) -> tuple[list[object], str]:
    """The samples with which the rank renews statistics after its last step, if no collective follows, and the line."""
    samples: list[object] = []
    where, exchanged, used = "", False, False
    for _, event in process.events:
        if isinstance(event, StepTaken):
            samples, where, exchanged, used = [], "", False, False
        elif isinstance(event, Evaluated) and event.forward.refreshes and not exchanged and not used:
            samples += event.forward.names(process.identity)
            where = where or event.where
        elif samples and isinstance(event, Collective) and "barrier" not in event.name:
            exchanged = exchanged or not used
        elif samples and isinstance(event, (Evaluated, Saved)):
            used = True
    return ([], "") if exchanged else (samples, where)
