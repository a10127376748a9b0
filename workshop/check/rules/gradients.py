"""Whether all ranks hold the same gradients and parameters, and those that one process would have."""

from collections import Counter

from workshop.check.evidence.events import Backward, Collective, LayersSeen, StepBegun, StepTaken, UnevenJoined, Wrapped
from workshop.check.evidence.run import Process, Run, Step
from workshop.check.evidence.sketches import CLOSE, difference, different_names, ratio
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.rules.words import listed
from workshop.check.scenarios import SINGLE, WHOLE

NEEDS = (StepBegun, StepTaken, Backward, Wrapped, Collective, UnevenJoined)


@rule(
    why="Without averaged gradients each process trains a different model, and one of them is saved.",
    fix="Wrap the model in DistributedDataParallel and call the wrapper in the forward pass; its backward() averages.",
    runs=WHOLE,
    needs=NEEDS,
    after=(no_group, wrong_group),
    spoils=True,
    anywhere=True,
)
def gradients_differ(run: Run) -> Said:
    """The ranks hold different gradients at a step, or equal ones only because they saw the same samples."""
    apart = _first_apart(run)
    if apart:
        yield from (seen for kind, seen in [apart] if kind == "gradients")
        return
    ranks = run.trained
    if len(ranks) > 1 and not ranks[0].first(Wrapped) and not _averages_by_hand(ranks[0]) and _same_inputs(ranks):
        seen = "the gradients agree only because all ranks train on the same samples: nothing averages them"
        yield Seen(seen, ranks[0].steps[0].before.where)


@rule(
    why="The replicas have to hold the same parameters at all times; otherwise they train different models.",
    fix="Let DistributedDataParallel copy rank 0's parameters (it does so when it is created), load checkpoints on every rank, "
    "and give all ranks the same optimizer and learning rate.",
    runs=WHOLE,
    needs=NEEDS,
    after=(no_group, wrong_group),
    spoils=True,
    anywhere=True,
)
def weights_differ(run: Run) -> Said:
    """The ranks begin with different parameters, or step to different ones."""
    apart = _first_apart(run)
    if apart and apart[0] == "weights":
        yield apart[1]


def _first_apart(run: Run) -> tuple[str, Seen] | None:
    """Where two ranks first hold different "gradients" or "weights"."""
    ranks = run.trained
    joined = any(process.first(UnevenJoined) for process in ranks)
    for process in ranks[1:]:
        for index in range(min(len(ranks[0].steps), len(process.steps))):
            apart = _apart_at(ranks[0], process, index, joined)
            if apart:
                return apart
    return None


def _apart_at(base: Process, other: Process, index: int, joined: bool) -> tuple[str, Seen] | None:
    one, two = base.steps[index], other.steps[index]
    gradients = difference(one.before.gradients, two.before.gradients) > CLOSE
    if index == 0 and difference(one.before.weights, two.before.weights) > CLOSE:
        if gradients:
            return "gradients", _unequal_gradients(base, other, index, ", and they began with different parameters")
        which = listed(different_names(one.before.weights, two.before.weights, one.before.names))
        return "weights", Seen(f"the ranks begin with different parameters ({which})", one.before.where)
    if joined:
        return None
    if gradients:
        return "gradients", _unequal_gradients(base, other, index)
    if one.after and two.after and difference(one.after.weights, two.after.weights) > CLOSE:
        which = listed(different_names(one.after.weights, two.after.weights, one.before.names))
        rates = (one.before.rates, two.before.rates)
        more = "" if rates[0] == rates[1] else f"; their learning rates are {rates[0]} and {rates[1]}"
        seen = f"the gradients agree, but after step {index + 1} the parameters do not ({which}){more}"
        return "weights", Seen(seen, one.before.where)
    return None


def _unequal_gradients(base: Process, other: Process, index: int, also: str = "") -> Seen:
    one, two = base.steps[index], other.steps[index]
    which = different_names(one.before.gradients, two.before.gradients, one.before.names)
    of = f" for {listed(which)}" if len(which) < len(one.before.names) else ""
    where, reason = _why_unequal(base, one, two)
    return Seen(f"before step {index + 1} the ranks hold different gradients{of}{also}; {reason}", where)


def _why_unequal(base: Process, one: Step, two: Step) -> tuple[str, str]:
    """The line to look at, and why the gradients are not averaged."""
    where = one.before.where
    last = one.backwards[-1] if one.backwards else None
    if not base.first(Wrapped):
        if _averages_by_hand(base):
            return where, "nothing averages all of them"
        return where, "nothing averages them: the model is in no DistributedDataParallel"
    if last and last.forward and not last.forward.wrapped:
        return (
            last.forward.where,
            "the forward pass bypasses DistributedDataParallel: call the wrapper, not the model inside",
        )
    if last and last.sync is False:
        return last.where, "the last backward() before the step is under no_sync()"
    if last is None or len(one.backwards) != len(two.backwards):
        counts = f"{len(one.backwards)} backward passes on one rank and {len(two.backwards)} on the other"
        return where, f"this step belongs to {counts}"
    return where, "something changes them on one rank after backward(), or they were averaged before they were complete"


def _averages_by_hand(process: Process) -> bool:
    """Whether a collective is called between a backward pass and its step."""
    after_backward = False
    for _, event in process.events:
        if isinstance(event, Collective) and after_backward:
            return True
        after_backward = isinstance(event, Backward) or (after_backward and not isinstance(event, StepBegun))
    return False


def _same_inputs(ranks: list[Process]) -> bool:
    """Whether all ranks gave their models the same at each step."""
    together = list(zip(*(process.steps for process in ranks), strict=False))
    return bool(together) and all(step.rows and step.rows == steps[0].rows for steps in together for step in steps)


# ---------------------------------------------------------------- compared with one process


@rule(
    why="A multiple of the averaged gradient changes the effective learning rate.",
    fix="Average, do not sum: DistributedDataParallel already divides by the number of processes, so neither multiply nor "
    "divide the loss by it.",
    runs=(WHOLE, SINGLE),
    needs=(*NEEDS, LayersSeen),
    spoils=True,
)
def gradient_scale(run: Run, single: Run) -> Said:
    """The gradient is a multiple of that of one process on the same samples."""
    return _of_kind("gradient-scale", run, single)


@rule(
    why="N processes that see the batches of one process should compute the same training.",
    fix="Compare what the processes do with one process on the same global batches: the mean over all samples, the learning "
    "rate, and what each process changes in the model.",
    runs=(WHOLE, SINGLE),
    needs=(*NEEDS, LayersSeen),
    spoils=True,
)
def differs_from_one_process(run: Run, single: Run) -> Said:
    """Gradient, learning rate or parameters are not those of one process on the same samples."""
    if not run.trained:
        return
    if _has_batchnorm(run):
        text = "whether one process computes the same: BatchNorm uses the batch of each process by itself"
        yield NotJudged(text, goal=False)
    elif not single.trained:
        yield NotJudged("whether one process computes the same: with one process it does not train", goal=False)
    yield from _of_kind("differs-from-one-process", run, single)


def against_one_process(run: Run, single: Run) -> tuple[str, Seen] | None:
    """The kind and the text of the first difference from one process; None where the batches differ or numbers are drawn.

    Args:
        run: N processes.
        single: one process, with N (and where it accumulates, as many more) times the batch.
    """
    if not run.trained or not single.trained:
        return None
    if _has_batchnorm(run):
        return _loss_scale(run, single)
    if any(process.draws for process in run.trained):  # each process draws its own random numbers
        return None
    alone = single.trained[0].steps
    for index in range(min(len(run.trained[0].steps), len(alone))):
        steps = [process.steps[index] for process in run.trained if index < len(process.steps)]
        here = Counter(row for step in steps for row in step.rows)
        if not here or here != Counter(alone[index].rows):
            return None
        if index == 0 and difference(steps[0].before.weights, alone[0].before.weights) > CLOSE:
            return None
        found = _other_step(run, index, steps[0], alone[index])
        if found:
            return found
    return None


def _of_kind(kind: str, run: Run, single: Run) -> Said:
    found = against_one_process(run, single)
    if found and found[0] == kind:
        yield found[1]


def _other_step(run: Run, index: int, step: Step, alone: Step) -> tuple[str, Seen] | None:
    """How a step differs from that of one process on the same samples."""
    one, two = step.before, alone.before
    differs = "differs-from-one-process"
    factor = ratio(one.gradients, two.gradients)
    if factor is not None and abs(factor - 1) > 0.03:
        accumulated = run.accumulate > 1 and abs(factor - run.accumulate) < 0.1 * run.accumulate
        seen = f"the gradient of step {index + 1} is {factor:.2f} times that of one process on the same samples"
        return "accumulation-scale" if accumulated else "gradient-scale", Seen(seen, one.where)
    if index == 0 and factor is None and difference(one.gradients, two.gradients) > 0.02:
        which = listed(different_names(one.gradients, two.gradients, one.names))
        seen = f"on the same samples the gradient of step 1 is not the one that one process has ({which})"
        return differs, Seen(seen, one.where)
    if one.rates != two.rates:
        rates = f"{one.rates} with {run.nproc} processes and {two.rates} with one"
        return differs, Seen(f"the learning rate is {rates}, for the same global batch", one.where)
    if step.after and alone.after and difference(step.after.weights, alone.after.weights) > 0.05:
        seen = f"on the same samples the parameters after step {index + 1} are not those of one process"
        return differs, Seen(seen, one.where)
    return None


def _has_batchnorm(run: Run) -> bool:
    """Whether a layer normalizes with the batch of its process: then two processes rightly differ from one."""
    return any(event.batchnorm for process in run.trained for event in process.of(LayersSeen))


def _loss_scale(run: Run, single: Run) -> tuple[str, Seen] | None:
    """Whether the losses of step 1 add up to that of one process on the same samples, as near as BatchNorm lets them."""
    step = run.trained[0].steps[0]
    ours, theirs = (sum(each.loss or 0 for each in one.backwards) for one in (step, single.trained[0].steps[0]))
    if not theirs or abs(ours / theirs - 1) < 0.25:
        return None
    seen = f"backward() is given {ours / theirs:.2f} times the loss that one process has on the same samples, in step 1"
    return "accumulation-scale" if run.accumulate > 1 else "gradient-scale", Seen(seen, step.before.where)
