"""Whether all ranks hold the same gradients and parameters, and those that one process would have."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice

from workshop.check.evidence.events import (
    Backward,
    BuffersSeen,
    Collective,
    GradientsClipped,
    LayersSeen,
    LossComputed,
    ModelCopied,
    ModelEvaluated,
    ModelUpdated,
    StepBegun,
    StepTaken,
    UnevenJoined,
    Wrapped,
)
from workshop.check.evidence.misuses import BuffersKept, ClipLimit, LossReduced
from workshop.check.evidence.process import Process, Step
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference, different_names, ratio
from workshop.check.rules.divergence import TO_ONE, decided_by_one
from workshop.check.rules.learning import of_steps
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.replicas import begun_apart, parted
from workshop.check.rules.rounds import exchanged_in_steps, of_its_own, own_parts, sum_of_changes
from workshop.check.rules.rule import RULES, Makes, NotJudged, Rule, Said, Seen, Told, findings, rule
from workshop.check.rules.unequal import COPY_BACK, after_backward, reduced_losses, unclipped, vector_sent, why_unequal
from workshop.check.rules.words import listed, named
from workshop.check.scenarios import SINGLE, WHOLE

ALIKE = "Set the same seed on all ranks before the model is created, or broadcast() the parameters of rank 0."
UNEXPLAINED = ("", "reseeded")  # origins of findings that do not know the line of the cause
OF_A_RANK = re.compile(r"queue|bank|memory|cache|ptr|pointer", re.IGNORECASE)  # buffers that may differ on purpose
FIRST = 4  # evaluations of a model, in order, which are those at the same time
UNREACHED = 100  # a limit is so far above the norms that it is to clip nothing
UNEVEN = 1.1  # the ratio of numbers of targets that a random mask, for example, does not explain
ROUNDED = 2e-3  # gradients of float32 agree more closely
beside_one_process: "partial[Makes[[Run, Run]]]" = partial(rule, runs=(WHOLE, SINGLE), needs=(LayersSeen,), spoils=True)


@of_steps(
    why="Without averaged gradients each process trains a different model, and only one of them is saved.",
    fix="Wrap the model in DistributedDataParallel and call the wrapper in the forward pass; then backward() averages.",
)
def gradients_differ(run: Run) -> Said:
    """The ranks hold different gradients at a step, or equal ones only because they saw the same samples."""
    return findings(gradients_differ, _apart, run)


@of_steps(
    why="All ranks must hold the same parameters before each step; otherwise they train different models.",
    fix="Let DistributedDataParallel copy the parameters of rank 0; load checkpoints and set the learning rate on every rank.",
)
def weights_differ(run: Run) -> Said:
    """The ranks begin with different parameters, or step to different ones."""
    for seen in findings(weights_differ, _apart, run):
        found = parted(run, seen.where) if isinstance(seen, Seen) and seen.origin in UNEXPLAINED else None
        yield found.added_to(seen.text) if found and isinstance(seen, Seen) else seen


@rule(
    why="Each rank scales its gradients by a factor of its own, so the direction of the step is wrong.",
    fix="Clip after the gradients are averaged; with FSDP call model.clip_grad_norm_() (FSDP1) or clip DTensors (fully_shard).",
    needs=(GradientsClipped,),
    after=(no_group, wrong_group, gradients_differ, weights_differ),
    anywhere=True,
)
def clipping_differs(run: Run) -> Said:
    """The ranks clip by different norms."""
    clipped = [process.of(GradientsClipped) for process in run.trained]
    largest = max((event.total for events in clipped for event in events if event.total), default=0.0)
    if of_its_own(run) or any(event.limit > UNREACHED * largest for event in run.all(ClipLimit)):
        return  # the norms are only logged
    for together in zip(*clipped, strict=False):
        norms = [event.total for event in together if event.total is not None]
        if len(norms) == len(together) > 1 and max(norms) - min(norms) > CLOSE * max(norms):
            shown = " and ".join(f"{norm:.4g}" for norm in norms[:4])
            local = "holds:to_local holds:get_total_norm here"
            yield Seen(f"in the same step the ranks clip by the norms {shown}", together[0].where, origin=local)
            return


@rule(
    why="DistributedDataParallel keeps only the wrapped model equal on all ranks, not a second one, such as an EMA or a teacher.",
    fix="Copy the second model after DistributedDataParallel has wrapped the first, and update it on every rank.",
    needs=(ModelCopied, ModelUpdated),
    after=(no_group, wrong_group, gradients_differ, weights_differ),
    anywhere=True,
)
def models_differ(run: Run) -> Said:
    """The ranks evaluate a model with different parameters."""
    for base, other in _evaluated_differently(run):
        which = listed(different_names(base.weights, other.weights, base.names))
        seen = f"the ranks evaluate {base.model} with different parameters ({which})"
        reason, where = _why_copies_differ(run.trained, base)
        found = None if where else parted(run, base.where) or begun_apart(run, base.where)
        yield found.added_to(seen) if found else Seen(seen + reason, where or base.where, origin="passed:class")
        return


def steps_until_apart(run: Run) -> int:
    """After how many steps a second run shows at which line parameters become different; 0: it is known, or they do not."""
    apart = _apart(run)
    if any(about is gradients_differ or seen.origin not in UNEXPLAINED for about, seen in apart):
        return 0
    if any(about is weights_differ for about, _ in apart):
        together = zip(*(process.steps for process in run.trained), strict=False)
        for number, (first, *others) in enumerate(together, 1):
            if any(difference(first.before.weights, step.before.weights) > CLOSE for step in others):
                return number + 1
        return 0
    known = (each[0] for each in _evaluated_differently(run) if not _why_copies_differ(run.trained, each[0])[1])
    return max((each.steps + 1 for each in islice(known, 1)), default=0)


def _evaluated_differently(run: Run) -> Iterator[tuple[ModelEvaluated, ModelEvaluated]]:
    """Yield evaluations that two ranks make together, of a model with different parameters (that are not parts, as in FSDP1)."""
    for base, *others in _evaluated_together(run.trained) if len(run.trained) > 1 and not run.divided else ():
        for other in others:
            alike = (other.where, other.model, other.names) == (base.where, base.model, base.names)
            if alike and "_flat_param" not in " ".join(base.names) and difference(base.weights, other.weights) > CLOSE:
                yield base, other


def _evaluated_together(ranks: list[Process]) -> Iterator[tuple[ModelEvaluated, ...]]:
    """Yield the evaluations that the ranks make at the same time: the first of each model in order, later ones by the step."""
    early: list[list[ModelEvaluated]] = []
    late: list[dict[tuple[object, ...], ModelEvaluated]] = []
    for process in ranks:
        seen = Counter[tuple[str, ...]]()
        early.append([])
        late.append({})
        wrapped = next((seconds for seconds, _ in process.timed(Wrapped)), 0.0)
        for seconds, each in process.timed(ModelEvaluated):
            if seconds < wrapped:  # the wrapper then sends the parameters of rank 0 to all ranks
                continue
            model = each.model, *each.names
            seen[model] += 1
            if seen[model] <= FIRST:
                early[-1].append(each)
            else:
                late[-1][each.steps, *model] = each
    yield from (together for together in zip(*early, strict=False) if len({each.steps for each in together}) == 1)
    if len({len(process.of(StepTaken)) for process in ranks}) == 1:
        for key in late[0]:
            if all(key in events for events in late):
                yield tuple(events[key] for events in late)


@rule(
    why="The values that the other ranks have computed are lost, so the buffer contains what rank 0 has seen.",
    fix="Compute the same buffer on every rank: gather the values of all ranks (all_gather), or average them with all_reduce.",
    needs=(BuffersSeen,),
    after=(no_group, wrong_group, gradients_differ, weights_differ),
    anywhere=True,
)
def buffers_overwritten(run: Run) -> Said:
    """The ranks compute different buffers, and DistributedDataParallel replaces them with those of rank 0."""
    if any(run.all(Wrapped)) and (found := _different_buffers(run)):
        where, names = found
        seen = f"before each forward pass, DistributedDataParallel replaces the buffer {listed(names)} of a rank with "
        yield Seen(seen + "that of rank 0, and they are different", where, origin=_changes(names[0]))


@rule(
    why="The ranks train one model, but the same input becomes a different one on each rank.",
    fix="Update the buffer with the values of all ranks: sum the counts, sums and squares over the ranks with all_reduce.",
    needs=(BuffersSeen,),
    after=(no_group, wrong_group, gradients_differ, weights_differ),
    anywhere=True,
)
def scaled_differently(run: Run) -> Said:
    """A layer changes the inputs with buffers that differ between the ranks, such as a running mean of the inputs."""
    if not any(run.all(Wrapped)) and not of_its_own(run) and (found := _different_buffers(run)):
        where, names = found
        seen = f"a layer without parameters changes the inputs with its buffer {listed(names)}, which differs between the ranks"
        yield Seen(seen, where, origin=_changes(names[0]))


@rule(
    why="The same input has different outputs on different ranks, and a checkpoint contains the buffers of one rank.",
    fix="Change the buffer on all ranks in the same way: sum the values of all ranks with all_reduce(), or broadcast() those of "
    "one rank.",
    needs=(BuffersKept,),
    after=(no_group, wrong_group, gradients_differ, weights_differ),
    anywhere=True,
)
def buffers_differ(run: Run) -> Said:
    """DistributedDataParallel does not send the buffers, and each rank changes them in a different way."""
    if found := _kept_apart(run):
        where, names, _ = found
        seen = f"the ranks have different values in {listed(names)}, and DistributedDataParallel does not send buffers"
        source = parted(run, run.trained[0].step_where, buffers=True)
        yield source.added_to(seen) if source else Seen(seen, where, origin=_changes(names[0]))


def steps_until_buffers_differ(run: Run) -> int:
    """After how many steps a second run shows at which line buffers become different; 0: they do not."""
    found = None if any(process.replica.changes for process in run.trained) else _kept_apart(run)
    return found[2] + 1 if found else 0


def _kept_apart(run: Run) -> tuple[str, list[str], int] | None:
    """The buffers that the ranks keep, and that still differ in the end; the line of the forward pass, and the steps before."""
    ranks = [] if run.divided else [[*_kept(process)] for process in run.trained]
    for names in dict.fromkeys(tuple(event.names) for _, event in ranks[0]) if len(ranks) > 1 else ():  # of each module
        if found := _apart_until_the_end([[each for each in kept if tuple(each[1].names) == names] for kept in ranks]):
            return found
    return None


def _apart_until_the_end(ranks: list[list[tuple[int, BuffersKept]]]) -> tuple[str, list[str], int] | None:
    """The same, for the buffers of one module."""
    apart: list[tuple[str, list[str], int]] = []
    own: set[str] = set()
    for (steps, first), *others in zip(*ranks, strict=False):
        names = [name for _, each in others for name in different_names(first.buffers, each.buffers, first.names)]
        own |= set() if steps else set(names)  # from the start, such as the place of the rank in a gathered batch
        names = [name for name in dict.fromkeys(names) if name not in own and not OF_A_RANK.search(name)]
        apart = [*apart, (first.where, names, steps)] if names else []
    return apart[0] if len(apart) > 1 else None


def _kept(process: Process) -> Iterator[tuple[int, BuffersKept]]:
    """Yield the buffers that DistributedDataParallel leaves as they are, each with the number of steps before."""
    steps = 0
    for _, event in process.events:
        steps += isinstance(event, StepTaken)
        if isinstance(event, BuffersKept):
            yield steps, event


def _different_buffers(run: Run) -> tuple[str, list[str]] | None:
    """The buffers that differ between the ranks each time that they are recorded, and the line of the first forward pass."""
    ranks = [] if run.divided else [process.of(BuffersSeen) for process in run.trained]
    different: list[list[str]] = []
    for first, *others in zip(*ranks, strict=False) if len(ranks) > 1 else ():
        names = [name for each in others for name in different_names(first.buffers, each.buffers, first.names)]
        different.append(list(dict.fromkeys(names)))
    return (ranks[0][0].where, different[-1]) if len(different) > 1 and all(different) else None


def _changes(buffer: str) -> str:
    """The origin of a statement that changes a buffer, or makes the part of the model that has it."""
    return rf"text:\.{buffer.rpartition('.')[2]}(\[.*\])?\s*[-+*]?=[^=] member:{buffer.partition('.')[0]}"


def _why_copies_differ(ranks: list[Process], model: ModelEvaluated) -> tuple[str, str]:
    """Why a second model differs between the ranks, and the line of the cause; "" if it was not seen."""
    for together in zip(*(process.of(ModelCopied) for process in ranks), strict=False):
        first = together[0]
        alike = all((each.where, each.names) == (first.where, model.names) for each in together)
        if alike and any(difference(first.weights, each.weights) > CLOSE for each in together):
            return f"; they differed already when deepcopy() made the copy at {first.where}", first.where
    updates = [[each for each in process.of(ModelUpdated) if each.model == model.model] for process in ranks]
    updated = next((number for number, events in enumerate(updates) if events), None)
    idle = next((process for process, events in zip(ranks, updates, strict=True) if not events), None)
    if updated is None or idle is None:
        return "", ""
    # The call that only one rank makes is in the innermost function that the other rank runs too.
    lines = [tuple(event.where.rpartition(":")[::2]) for _, event in idle.events if event.where]
    for file, where, first_line, last_line in updates[updated][0].calls:
        if any(name == file and first_line <= int(line) <= last_line for name, line in lines):
            return f"; only {named(ranks[updated])} updates the copy, at {where}", where
    return "", ""


def _apart(run: Run) -> Told:
    """Where two ranks first hold different gradients or parameters."""
    ranks = run.trained
    joined = any(process.first(UnevenJoined) for process in ranks)
    if run.divided or any(step.before.sharded for process in ranks for step in process.steps) or own_parts(ranks):
        return []  # each rank has its own part
    if not all(step.before.of_model for process in ranks for step in process.steps):
        return _begun_apart(ranks)  # an optimizer has copies of the parameters, or other tensors
    if of_its_own(run) or (run.asked is None and exchanged_in_steps(ranks)):
        return []
    for process in ranks[1:]:
        for number, (one, two) in enumerate(zip(ranks[0].steps, process.steps, strict=False), 1):
            if found := _apart_at(number, one, two, (ranks[0], process), joined):
                return [found]
    together = list(zip(*(process.steps for process in ranks), strict=False))
    same = together and all(step.rows and step.rows == steps[0].rows for steps in together for step in steps)
    if len(ranks) > 1 and same and not ranks[0].first(Wrapped) and not after_backward(ranks[0]):
        seen = "the gradients agree only because all ranks train on the same samples: nothing averages them"
        return [(gradients_differ, Seen(seen, ranks[0].step_where))]
    return []


def _begun_apart(ranks: list[Process]) -> Told:
    """Whether the ranks exchange values, but begin with different parameters of the model."""
    begun = [next((step.before for step in process.steps if step.before.of_model), None) for process in ranks]
    first = begun[0] if ranks[0].first(Collective) else None
    for other in begun[1:]:
        if first and other and first.trainer == other.trainer and difference(first.weights, other.weights) > CLOSE:
            return [_begin_differently(first, other, ranks[0])]
    return []


def _begin_differently(one: StepBegun, other: StepBegun, base: Process) -> tuple[Rule, Seen]:
    seen = (
        f"the ranks begin with different parameters ({listed(different_names(one.weights, other.weights, one.names))})"
    )
    if base.first(Wrapped) or not (vector := vector_sent(base)):
        return weights_differ, Seen(seen, one.where, fix="" if base.first(Wrapped) else ALIKE, origin="reseeded")
    seen += f", although rank 0 has sent a vector with broadcast() at {vector}"
    return weights_differ, Seen(seen, vector, fix=COPY_BACK, origin="here")


def _apart_at(
    number: int, one: Step, two: Step, ranks: tuple[Process, Process], joined: bool
) -> tuple[Rule, Seen] | None:
    """How the same step differs between two ranks."""
    before, other, base = one.before, two.before, ranks[0]
    begun = number == 1 and difference(before.weights, other.weights) > CLOSE
    # However a program without a wrapper shares the work among its ranks, they must begin alike.
    explained = begun and not base.first(Wrapped) and base.first(Collective) is not None
    if (begun or not joined) and not explained and difference(before.gradients, other.gradients) > CLOSE:
        which = different_names(unclipped(base, before), unclipped(ranks[1], other), before.names)
        if not which:  # the ranks clip them differently
            which = different_names(before.gradients, other.gradients, before.names)
        of = f" for {listed(which)}" if len(which) < len(before.names) else ""
        also = ", and they began with different parameters" if begun else ""
        where, reason, fix, *origin = why_unequal(base, one, two, which)
        seen = f"before step {number} the ranks hold different gradients{of}{also}; {reason}"
        return gradients_differ, Seen(seen, where, fix=fix, origin="".join(origin) or "here")
    if begun:
        return _begin_differently(before, other, base)
    if not joined and one.after and two.after and difference(one.after.weights, two.after.weights) > CLOSE:
        which = different_names(one.after.weights, two.after.weights, before.names)
        rates = f"; their learning rates are {before.rates} and {other.rates}" if before.rates != other.rates else ""
        seen = f"the gradients agree, but after step {number} the parameters do not ({listed(which)}){rates}"
        if rates and (where := decided_by_one(base, before)):
            seen += f"; before that, reduce() at {where} gave its result to one rank only"
            return weights_differ, Seen(seen, where, fix=TO_ONE, origin="plateau:before")
        return weights_differ, Seen(seen, before.where, origin="plateau one-rank:step receiver:step" if rates else "")
    return None


OWN_LOSS = (
    "Call backward() on the loss of the rank: DistributedDataParallel averages the gradients. For printing, reduce a copy: "
    "loss.detach().clone()."
)


@beside_one_process(
    why="The gradient is a multiple of the average, which changes the effect of clipping and of the learning rate of SGD.",
    fix="DistributedDataParallel divides the gradients by the number of processes, so do not divide the loss by it too. If you "
    "divide the loss by a count over all ranks, multiply it by the number of processes.",
    anywhere=True,
    origin="call:register_comm_hook receiver:backward divisor:compute_loss given-loss",
)
def gradient_scale(run: Run, single: Run) -> Said:
    """The gradient is a multiple of that of one process on the same samples."""
    return findings(gradient_scale, against_one_process, run, single) if not reduced_losses(run) else ()


@gradient_scale.also(WHOLE, active=True, needs=(LossReduced,), after=(gradients_differ, weights_differ))
def reduced_loss_divided(run: Run) -> Said:
    """The loss is divided by the number of processes after all_reduce(), which autograd does not see."""
    for event in reduced_losses(run)[:1]:
        seen = (
            f"the loss of backward(), or a term of it, is divided by {run.nproc} after {event.name}(), which autograd does not "
            f"see: its gradient is {event.factor:.2f} times that of the mean"
        )
        yield Seen(seen, event.where, fix=OWN_LOSS, origin="here")


@gradient_scale.also(WHOLE, active=True, after=(gradients_differ, weights_differ))
def changes_summed(run: Run) -> Said:
    """The ranks take steps of their own, and then use a sum instead of the average."""
    if found := sum_of_changes(run):
        fix = "Divide the sum by the number of processes, or use all_reduce with ReduceOp.AVG."
        yield Seen(*found, fix=fix, origin="here")


@beside_one_process(
    why="N processes with the same global batches as one process should compute the same training.",
    fix="Compare the mean over all samples, the learning rate and the parameters with those of one process that has the same "
    "global batch.",
)
def differs_from_one_process(run: Run, single: Run) -> Said:
    """Gradient, learning rate or parameters are not those of one process on the same samples."""
    if any(event.batchnorm for event in run.all(LayersSeen)):
        yield NotJudged("whether one process computes the same: BatchNorm uses the batch of each process", goal=False)
    elif run.trained and not single.trained:
        yield NotJudged("whether one process computes the same: with one process it does not train", goal=False)
    yield from findings(differs_from_one_process, against_one_process, run, single)


def against_one_process(run: Run, single: Run) -> Told:
    """How the steps first differ from those of one process with the same global batches."""
    if not run.trained or not single.trained:
        return []
    steps, alone = run.trained[0].steps, single.trained[0].steps
    if any(event.batchnorm for event in run.all(LayersSeen)):  # several processes may then differ a little from one
        ours, theirs = (sum(each.loss or 0 for each in first.backwards) for first in (steps[0], alone[0]))
        if theirs and not abs(ours / theirs - 1) < 0.25:  # NaN too
            about = RULES["accumulation-scale"] if run.accumulate > 1 else gradient_scale  # (it imports this module)
            seen = f"in step 1 backward() gets {ours / theirs:.2f} times the loss of one process"
            return [(about, Seen(seen, steps[0].before.where))]
    elif not any(process.draws for process in run.trained):  # each process draws its own random numbers
        for index, (one, two) in enumerate(zip(steps, alone, strict=False)):
            here = Counter(row for each in run.trained for step in each.steps[index : index + 1] for row in step.rows)
            begun = index == 0 and difference(one.before.weights, two.before.weights) > CLOSE
            if begun or not here or here != Counter(two.rows):
                break
            if found := _other_step(run, index + 1, one, two):
                return found
    return []


def _other_step(run: Run, number: int, step: Step, alone: Step) -> Told:
    """How a step differs from that of one process on the same samples."""
    one, two = step.before, alone.before
    seen = ""
    factor = ratio(one.gradients, two.gradients)
    if factor is not None and abs(factor - 1) > 0.03:
        return [_scaled(run, number, factor, step.backwards[-1].where if step.backwards else one.where)]
    if number == 1 and factor is None and difference(one.gradients, two.gradients) > 0.02:
        which = listed(different_names(one.gradients, two.gradients, one.names))
        seen = f"on the same samples the gradient of step 1 differs from that of one process ({which})"
    elif one.rates != two.rates:
        seen = f"the learning rate is {one.rates} with {run.nproc} processes and {two.rates} with one"
    elif difference(one.gradients, two.gradients) > ROUNDED:
        return []  # AdamW's first steps amplify the rounding of bfloat16, which differs between processors
    elif step.after and alone.after and difference(step.after.weights, alone.after.weights) > 0.05:
        seen = f"on the same samples the parameters after step {number} differ from those of one process"
    return [(differs_from_one_process, Seen(seen, one.where))] if seen else []


def _scaled(run: Run, number: int, factor: float, where: str) -> tuple[Rule, Seen]:
    """Which number the loss was divided by, if its gradient is a multiple of that of one process."""
    seen = f"the gradient of step {number} is {factor:.2f} times that of one process on the same samples"
    divided = run.accumulate / factor
    if run.accumulate > 1 and abs(divided - 1) < 0.1:
        return RULES["accumulation-scale"], Seen(f"{seen}: the sum over its {run.accumulate} batches", where)
    if run.accumulate > 1 and abs(divided - run.nproc) < 0.1:
        by = f"by {run.nproc}, the number of processes, and not by {run.accumulate}, the number of batches"
        return RULES["accumulation-scale"], Seen(f"{seen}: the loss is divided {by}", where)
    if by_hand := after_backward(run.trained[0]):
        return gradient_scale, Seen(seen, by_hand[0].where, origin="here")
    return gradient_scale, Seen(seen, where)


@rule(
    why="In the average of the ranks' means, a target on a rank with few targets counts more than one on a rank with many.",
    fix="Divide the sum of the losses by the number of targets on all ranks (use all_reduce). If the gradients are averaged, as "
    "by DistributedDataParallel, multiply the loss by the number of processes, because the average divides by it.",
    needs=(LossComputed,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def mean_of_means(run: Run) -> Said:
    """Each loss is the mean over its own targets, whose numbers differ within the step."""
    together = list(zip(*(weighted(process) for process in run.trained), strict=False))
    steps = [[each for backwards in step for each in backwards] for step in together]
    uneven = [] if run.divided or of_its_own(run) else [step for step in steps if step and _equal_weights(step)]
    if len(uneven) > len(steps) / 2:
        counts = [loss.targets for loss, _ in uneven[0]]
        seen = f"in a step the means are over {min(counts):,} to {max(counts):,} targets, and all have the same weight"
        loss = uneven[0][0][0]
        backward = next((each.where for each in run.trained[0].backwards), loss.where)
        yield Seen(seen, backward, origin="divisor") if loss.summed else Seen(seen, loss.where)


def weighted(process: Process) -> list[list[tuple[LossComputed, float]]]:
    """For each step, the cross entropies of its backward passes, each with the factor from its mean to the loss."""
    steps: list[list[tuple[LossComputed, float]]] = []
    losses: list[LossComputed] = []
    step: list[tuple[LossComputed, float]] = []
    for _, event in process.events:
        if isinstance(event, LossComputed):
            losses.append(event)
        elif isinstance(event, Backward):
            if len(losses) == 1 and event.loss is not None and math.isfinite(event.loss) and losses[0].mean:
                step.append((losses[0], event.loss / losses[0].mean))
            losses = []
        elif isinstance(event, StepBegun):
            steps.append(step)
            step = []
    return steps


def _equal_weights(step: list[tuple[LossComputed, float]]) -> bool:
    """Whether means over different numbers of targets, computed in the same line, have the same weight."""
    if len({loss.where for loss, _ in step}) > 1:
        return False
    counts = [loss.targets for loss, _ in step]
    factors = [factor for _, factor in step]
    return max(counts) > UNEVEN * min(counts) and max(factors) - min(factors) < 0.001 * abs(max(factors))
