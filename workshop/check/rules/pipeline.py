"""Programs that build pipeline parallelism by hand: which micro-batches each rank keeps, and what it sends."""

from collections.abc import Iterator

from workshop.check.evidence.events import Moment, StepTraced
from workshop.check.evidence.run import Run
from workshop.check.rules.rule import Seen
from workshop.check.rules.traced import TracedStep, mib, of_step
from workshop.check.rules.tried import case_rule, instead
from workshop.check.rules.words import plural

MORE = 1.5  # times as many layers as its share: a rank with more does not have a stage only
# Of the size of a message, per micro-batch: the most by which the memory may grow when equally many are kept. A rank may keep
# what it sends until the step ends; the input of a micro-batch and its gradient are twice this size.
GROWTH = 1.5
OTHER_CALLS = 2  # of a step: for example the sum of a loss
LATE = 1  # message that a rank may still send when its step ends


def _passes(step: TracedStep) -> Iterator[tuple[Moment, int]]:
    """The beginnings of the passes of a rank, each with the number of micro-batches that it keeps then."""
    moments = [each for each in step.traced.moments if each.what in ("forward", "backward")]
    moments = [
        each for each in moments if each.what == "backward" or each.phase != "backward"
    ]  # checkpointing recomputes
    begins = {what: next((each.name for each in moments if each.what == what), "") for what in ("forward", "backward")}
    kept = 0
    for each in moments:
        if each.name == begins[each.what]:
            yield each, kept
            kept += 1 if each.what == "forward" else -1


def _microbatches(step: TracedStep) -> int:
    return sum(each.what == "forward" for each, _ in _passes(step))


def _most_kept(step: TracedStep) -> int:
    return max((kept + 1 for each, kept in _passes(step) if each.what == "forward"), default=0)


# ---------------------------------------------------------------- the whole program


microbatches_differ = case_rule(
    __name__,
    "microbatches_differ",
    "The micro-batches together must have the gradients of the whole batch.",
    "Divide the loss of each micro-batch by their number, as when you accumulate gradients. Divide inputs and targets in the "
    "same way, and let all ranks compute the passes of the micro-batches in the same order.",
    "microbatches",
)
case_rule(
    __name__,
    "pipeline_fails",
    "A class that works only for the stages of the exercise fails with your own models.",
    "Receive each activation with the shape and data type that its rank has announced (send_object_list). Allow frozen "
    "parameters, and use the ranks of group. On all ranks, raise each ValueError that the docstring names, before a rank sends "
    "something.",
    "microbatch-errors", "one-stage", "stages", "frozen-stage", "whole-numbers",
    after=(microbatches_differ,),
)  # fmt: skip


def _of_pytorch(run: Run) -> Iterator[str]:
    moments = (moment for step in run.all(StepTraced) for moment in step.moments)
    return (moment.where for moment in moments if moment.what == "class")


instead(__name__, "pipeline_of_pytorch", "torch.distributed.pipelining", _of_pytorch, StepTraced)


@of_step(
    why="A rank that computes layers of other stages does their work again, so more GPUs do not make the step faster.",
    fix="Give each rank its own stage only, with split(model, stages)[rank], and get the activations from the previous rank.",
)
def stage_whole(step: TracedStep) -> Seen | None:
    """A rank computes more layers than those of its stage."""
    layers, whole = (
        {moment.name for moment in traced.moments if moment.what == "forward"} if traced else set()
        for traced in (step.traced, step.alone)
    )
    if step.ranks > 1 and len(layers) > MORE * len(whole) / step.ranks:
        where = next(each.where for each in step.traced.moments if each.what == "forward")
        return Seen(f"{step.who} of {step.ranks} computes {len(layers)} of the {plural(len(whole), 'layer')}", where)
    return None


# ---------------------------------------------------------------- goal 1: GPipe


case_rule(
    __name__,
    "gpipe_waits",
    "If only one stage computes at a time, all stages together are no faster than one GPU.",
    "For the schedule gpipe, compute the forward passes of all micro-batches first, and then all backward passes. Send each "
    "activation before the next forward pass begins (look up GPipe in torch.distributed.pipelining).",
    "gpipe",
    after=(microbatches_differ,),
)

# ---------------------------------------------------------------- goal 2: 1F1B


@of_step(
    why="A rank is idle if it waits for the gradients of the later stages and does not begin the next micro-batch meanwhile.",
    fix="In 1F1B, rank r of p computes p - 1 - r forward passes, and then a forward and a backward pass in turn (look up "
    "Schedule1F1B in torch.distributed.pipelining).",
    after=(stage_whole,),
)
def stage_waits(step: TracedStep) -> Seen | None:
    """A rank has fewer micro-batches under way than there are stages from its own on."""
    most, count, later = _most_kept(step), _microbatches(step), step.ranks - step.rank
    if 0 < most < min(later, count):
        begin = next(each for each, _ in _passes(step) if each.what == "backward")
        kept = plural(most, "micro-batch")
        seen = f"{step.who} begins a backward pass after {kept}, although {later} stages can compute at the same time"
        return Seen(seen, begin.where)
    if 0 < count < later:
        return Seen(f"{step.who} computes {plural(count, 'micro-batch')} per step, which is fewer than the {later} stages",
                    next(_passes(step))[0].where)  # fmt: skip
    return None


@of_step(
    why="Each micro-batch between its forward and its backward pass needs memory for its activations.",
    fix="In 1F1B, rank r of p computes p - 1 - r forward passes, and then a forward and a backward pass in turn, so that it "
    "keeps at most p - r micro-batches (look up Schedule1F1B in torch.distributed.pipelining).",
)
def many_kept(step: TracedStep) -> Seen | None:
    """A rank has more micro-batches between forward and backward pass than 1F1B needs."""
    most, needed = _most_kept(step), step.ranks - step.rank
    if most > needed:
        place = next(each for each, kept in _passes(step) if each.what == "forward" and kept + 1 == most)
        kept = plural(most, "micro-batch")
        return Seen(
            f"{step.who} of {step.ranks} keeps the activations of {kept}; with 1F1B it keeps {needed}", place.where
        )
    return None


@of_step(
    why="Activations that stay in memory after their backward pass need as much memory as with GPipe.",
    fix="Remove the input and the output of a micro-batch when its backward pass begins (for example with dict.pop), and keep "
    "losses with detach() only.",
)
def activations_stay(step: TracedStep) -> Seen | None:
    """The memory of a rank grows from one micro-batch to the next one."""
    sent = max((each.bytes for each in step.calls(names=("send", "broadcast"))), default=0)
    passes = list(_passes(step))
    first = next((place for place, (each, _) in enumerate(passes) if each.what == "backward"), len(passes))
    by_kept: dict[tuple[str, int], list[Moment]] = {}
    for each, kept in passes[first + 1 :]:  # from here on, the gradients exist
        by_kept.setdefault((each.what, kept), []).append(each)
    for begin, *others, end in (each for each in by_kept.values() if len(each) > 1):
        if end.held - begin.held > GROWTH * sent * (len(others) + 1) > 0:
            more, count = mib(end.held - begin.held), plural(len(others) + 1, "micro-batch")
            return Seen(f"{step.who} stores {more} more after {count} whose backward passes are over", end.where)
    return None


@of_step(
    why="A message whose handle is dropped may fail, or send a tensor that has been overwritten.",
    fix="Keep the handles of isend or batch_isend_irecv, and call wait() of each of them before the step ends.",
)
def sends_not_awaited(step: TracedStep) -> Seen | None:
    """Messages are still under way when the step ends."""
    count = step.under_way(len(step.traced.moments), ("send",))
    if count > LATE:
        sends = step.calls(names=("send",))
        return Seen(f"{step.who} does not wait for {count} of the {len(sends)} messages that it sends", sends[-1].where)
    return None


case_rule(
    __name__,
    "one_forward_one_backward_fails",
    "A schedule that works for one number of micro-batches may wait forever, or waste time, with a different number.",
    "In 1F1B, rank r of p computes p - 1 - r forward passes, and then a forward and a backward pass in turn. Send a result and "
    "receive the next input in one call of batch_isend_irecv, and do not hold a result back until the next one is ready.",
    "one-forward-one-backward",
    after=(stage_waits, many_kept, microbatches_differ),
)

# ---------------------------------------------------------------- goal 3: one message for each micro-batch and direction


@of_step(
    why="Each message has a fixed cost. A rank that waits for the announcement of a shape cannot receive anything meanwhile.",
    fix="Send the shape and the data type with send_object_list only in the first step and when the shape of the batch changes.",
)
def many_announcements(step: TracedStep) -> Seen | None:
    """A rank sends more messages than one per micro-batch and direction."""
    needed = _microbatches(step) * (2 if 0 < step.rank < step.ranks - 1 else 1)  # neighbors
    calls = step.calls("", "forward", "backward")
    sends = [each for each in calls if each.name == "send"]
    count = (
        len(sends) + (len(calls) - len(sends)) // 2
    )  # a rank also calls the collectives in which the other one sends
    announced = len(sends) > needed + 1  # an announcement takes two messages, and one message may be a loss
    if step.ranks > 1 and (announced or count > needed + OTHER_CALLS):
        small = min(calls, key=lambda each: each.bytes)
        passes = plural(_microbatches(step), "micro-batch")
        return Seen(f"{step.who} sends {count} messages for {passes}; {needed} are enough", small.where)
    return None


case_rule(
    __name__,
    "shape_forgotten",
    "The last batch of an epoch is often smaller. A rank that expects the old shape waits forever, or reads wrong numbers.",
    "Compare the shapes of each batch with those of the last one on all ranks. If they differ, announce the shape of the "
    "outputs again with send_object_list.",
    "other-shape",
    after=(microbatches_differ,),
)
