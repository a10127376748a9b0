"""Whether all ranks hold the same gradients and parameters, and those that one process would have."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from workshop.check.evidence.events import (
    Backward,
    BuffersSeen,
    Collective,
    Forward,
    GradientsClipped,
    LayersSeen,
    LossComputed,
    ModelCopied,
    ModelEvaluated,
    ModelUpdated,
    NotAwaited,
    StepBegun,
    StepTaken,
    UnevenJoined,
    Wrapped,
)
from workshop.check.evidence.run import Process, Run, Step
from workshop.check.evidence.sketches import CLOSE, difference, different_names, ratio
from workshop.check.rules.divergence import TO_ONE, collectives_since, reduced_to_one
from workshop.check.rules.learning import of_steps
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import RULES, Makes, NotJudged, Rule, Said, Seen, Told, findings, rule
from workshop.check.rules.words import listed, named
from workshop.check.scenarios import SINGLE, WHOLE

FIRST = 4  # evaluations of a model, in order, which are those at the same time
ROUNDED = 2e-3  # gradients of float32 agree more closely than this; those of bfloat16 often do not
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
    return findings(weights_differ, _apart, run)


@rule(
    why="Each rank scales its gradients by a factor of its own, so the direction of the step is wrong.",
    fix="Clip after the gradients are averaged; with FSDP call model.clip_grad_norm_() (FSDP1) or clip DTensors (fully_shard).",
    needs=(GradientsClipped,),
    after=(no_group, wrong_group, gradients_differ),
    anywhere=True,
)
def clipping_differs(run: Run) -> Said:
    """The ranks clip by different norms."""
    alone = _of_its_own(run)
    for together in zip(*(process.of(GradientsClipped) for process in run.trained), strict=False) if not alone else ():
        norms = [event.total for event in together if event.total is not None]
        if len(norms) == len(together) > 1 and max(norms) - min(norms) > CLOSE * max(norms):
            shown = " and ".join(f"{norm:.4g}" for norm in norms[:4])
            yield Seen(f"in the same step the ranks clip by the norms {shown}", together[0].where)
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
    for together in _evaluated_together(run.trained) if len(run.trained) > 1 and not run.divided else ():
        base = together[0]
        for other in together[1:]:
            alike = (other.where, other.model, other.names) == (base.where, base.model, base.names)
            if alike and difference(base.weights, other.weights) > CLOSE:
                which = listed(different_names(base.weights, other.weights, base.names))
                seen = f"the ranks evaluate {base.model} with different parameters ({which})"
                reason, where = _why_copies_differ(run.trained, base)
                yield Seen(seen + reason, where or base.where)
                return


def _evaluated_together(ranks: list[Process]) -> Iterator[tuple[ModelEvaluated, ...]]:
    """Yield the evaluations that the ranks make at the same time: the first of each model in order, later ones by the step."""
    early: list[list[ModelEvaluated]] = []
    late: list[dict[tuple[object, ...], ModelEvaluated]] = []
    for process in ranks:
        seen = Counter[tuple[str, ...]]()
        early.append([])
        late.append({})
        for each in process.of(ModelEvaluated):
            model = each.model, *each.names
            seen[model] += 1
            if seen[model] <= FIRST:
                early[-1].append(each)
            else:
                late[-1][each.steps, *model] = each
    yield from zip(*early, strict=False)
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
    if not any(run.all(Wrapped)) and not _of_its_own(run) and (found := _different_buffers(run)):
        where, names = found
        seen = f"a layer without parameters changes the inputs with its buffer {listed(names)}, which differs between the ranks"
        yield Seen(seen, where, origin=_changes(names[0]))


def _different_buffers(run: Run) -> tuple[str, list[str]] | None:
    """The buffers that differ between the ranks each time that they are recorded, and the line of the first forward pass."""
    ranks = [] if run.divided else [process.of(BuffersSeen) for process in run.trained]
    different: list[list[str]] = []
    for first, *others in zip(*ranks, strict=False) if len(ranks) > 1 else ():
        names = [name for each in others for name in different_names(first.buffers, each.buffers, first.names)]
        different.append(list(dict.fromkeys(names)))
    return (ranks[0][0].where, different[-1]) if len(different) > 1 and all(different) else None


def _changes(buffer: str) -> str:
    """The origin of a statement that changes a buffer."""
    return rf"text:\.{buffer.rpartition('.')[2]}(\[.*\])?\s*[-+*]?=[^=]"


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
    if any(step.before.sharded or not step.before.of_model for process in ranks for step in process.steps):
        return []  # each rank has its own part
    if run.divided or _of_its_own(run):
        return []
    for process in ranks[1:]:
        for number, (one, two) in enumerate(zip(ranks[0].steps, process.steps, strict=False), 1):
            if found := _apart_at(number, one, two, ranks[0], joined):
                return [found]
    together = list(zip(*(process.steps for process in ranks), strict=False))
    same = together and all(step.rows and step.rows == steps[0].rows for steps in together for step in steps)
    if len(ranks) > 1 and same and not ranks[0].first(Wrapped) and not _after_backward(ranks[0]):
        seen = "the gradients agree only because all ranks train on the same samples: nothing averages them"
        return [(gradients_differ, Seen(seen, ranks[0].step_where))]
    return []


def _of_its_own(run: Run) -> bool:
    """Whether each rank takes several steps of its own, and then they average their parameters (local SGD; in no exercise).

    Ranks that began alike have different parameters before some steps, and equal ones before a later step.
    """
    ranks = run.trained
    if run.asked or any(process.first(Wrapped) for process in ranks):
        return False
    if all(_begin_rounds_alike(ranks[0], process) for process in ranks[1:]):
        return len(ranks) > 1
    alike = []
    for first, *others in zip(*(process.steps for process in ranks), strict=False):
        alike.append(all(difference(first.before.weights, step.before.weights) <= CLOSE for step in others))
    return bool(alike) and alike[0] and (False, True) in pairwise(alike)


def _begin_rounds_alike(one: Process, other: Process) -> bool:
    """Whether two ranks have the same parameters after each exchange, and then take several steps, each its own number."""
    mine, theirs = _rounds(one), _rounds(other)
    alike = all(difference(a.weights, b.weights) <= CLOSE for a, b in zip(mine, theirs, strict=False))
    return (
        2 < len(mine) == len(theirs) < len(one.steps) / 2
        and alike
        and one.steps[1].before.weights != other.steps[1].before.weights
    )


def _rounds(process: Process) -> list[StepBegun]:
    """The first step after each exchange."""
    found: list[StepBegun] = []
    exchanged = True
    for _, event in process.events:
        if isinstance(event, Collective) and "barrier" not in event.name:
            exchanged = True
        elif isinstance(event, StepBegun) and exchanged:
            found.append(event)
            exchanged = False
    return found


def _apart_at(number: int, one: Step, two: Step, base: Process, joined: bool) -> tuple[Rule, Seen] | None:
    """How the same step differs between two ranks; ``base`` is the first of them."""
    before, other = one.before, two.before
    begun = number == 1 and difference(before.weights, other.weights) > CLOSE
    # However a program without a wrapper shares the work among its ranks, they must begin alike.
    explained = begun and not base.first(Wrapped) and base.first(Collective) is not None
    if (begun or not joined) and not explained and difference(before.gradients, other.gradients) > CLOSE:
        which = different_names(before.gradients, other.gradients, before.names)
        of = f" for {listed(which)}" if len(which) < len(before.names) else ""
        also = ", and they began with different parameters" if begun else ""
        where, reason, fix, *origin = _why_unequal(base, one, two, len(which) < len(before.names))
        seen = f"before step {number} the ranks hold different gradients{of}{also}; {reason}"
        return gradients_differ, Seen(seen, where, fix=fix, origin="".join(origin) or "here")
    if begun:
        which = different_names(before.weights, other.weights, before.names)
        seen = f"the ranks begin with different parameters ({listed(which)})"
        return weights_differ, Seen(seen, before.where, origin="reseeded")
    if not joined and one.after and two.after and difference(one.after.weights, two.after.weights) > CLOSE:
        which = different_names(one.after.weights, two.after.weights, before.names)
        rates = f"; their learning rates are {before.rates} and {other.rates}" if before.rates != other.rates else ""
        seen = f"the gradients agree, but after step {number} the parameters do not ({listed(which)}){rates}"
        if rates and (where := reduced_to_one(base, before)):
            seen += f"; before that, reduce() at {where} gave its result to one rank only"
            return weights_differ, Seen(seen, where, fix=TO_ONE)
        return weights_differ, Seen(seen, before.where, origin="plateau receiver:step" if rates else "")
    return None


def _why_unequal(base: Process, one: Step, two: Step, some: bool) -> tuple[str, ...]:
    """The line to look at, why the gradients are not averaged, what to do ("": the fix of the rule), and the origin, if any.

    ``some``: other parameters have the same gradients on both ranks.
    """
    where = one.before.where
    last = one.backwards[-1] if one.backwards else None
    if not base.first(Wrapped):
        return _unequal_by_hand(base, one)
    if last and (passed := _passed_before(base, one)):
        second, first = passed
        reason = (
            f"an earlier backward() also goes through the forward pass at {first.where}, so DistributedDataParallel averages its "
            "gradients there, and not in this step"
        )
        return second.where, reason, "Call detach() on the output of the first model in the loss of the second model."
    if last and last.forward and not last.forward.wrapped:
        fix = "Call the wrapper of DistributedDataParallel in the forward pass, not the model inside it (`.module`)."
        return last.forward.where, "the forward pass bypasses DistributedDataParallel: call the wrapper", fix
    if last and last.sync is False:
        fix = "Run the forward pass and backward() of the last batch of each step outside no_sync()."
        if last.unsynced:
            return last.unsynced, "the last backward() before the step is under no_sync()", fix
        fix = "Set require_backward_grad_sync to True before the forward pass of the last batch of each step."
        return last.where, "require_backward_grad_sync is False in the last forward pass before the step", fix, "sync"
    beside = next((each for each in last.others if not each.wrapped), None) if last and some else None
    if beside:
        fix = "Wrap each module that is trained in DistributedDataParallel, and call the wrappers in the forward pass."
        return beside.where, "the loss also depends on a module that DistributedDataParallel does not wrap", fix
    if last is None or len(one.backwards) != len(two.backwards):
        fix = "Give all ranks the same number of batches in each step."
        return (
            where,
            f"it has {len(one.backwards)} backward passes on one rank and {len(two.backwards)} on the other",
            fix,
        )
    what = "something changes them on one rank after backward(), or they were averaged before they were complete"
    return (
        where,
        what,
        "Call backward() once for each forward pass of the wrapper, and change gradients on all ranks alike.",
    )


def _unequal_by_hand(base: Process, one: Step) -> tuple[str, ...]:
    """The same for a program without a wrapper."""
    where = one.before.where
    averaging = {each.where for each in _after_backward(base)}
    if lost := next((each for each in base.of(NotAwaited) if each.where in averaging), None):
        fix = "Keep the handle that the call with async_op=True returns, and call its wait() before you use the result."
        return lost.where, f"nothing waits for the asynchronous {lost.name} before the step", fix
    if not averaging:
        what = "nothing averages them, because the model is not wrapped in DistributedDataParallel"
        passes = [each.forward.where for each in one.backwards if each.forward]
        return (passes[-1] if passes else where), what, "", "model"
    calls = collectives_since(base, Backward, one.before)
    if calls and all(call.name == "reduce" for call in calls):
        return calls[0].where, "reduce() gives the sum to one rank only", TO_ONE
    return (
        calls[0].where if calls else where,
        "not all of them are averaged",
        "Average the gradients of all parameters with all_reduce before each step.",
    )


def _after_backward(process: Process) -> list[Collective]:
    """The collectives that are called between a backward pass and its step: they average gradients by hand."""
    found: list[Collective] = []
    since: list[Collective] | None = None
    for _, event in process.events:
        if isinstance(event, Backward):
            since = []
        elif isinstance(event, StepBegun):
            found, since = [*found, *(since or [])], None
        elif isinstance(event, Collective) and since is not None:
            since.append(event)
    return found


def _passed_before(base: Process, step: Step) -> tuple[Forward, Forward] | None:
    """If a step has no forward pass of a wrapper: two that the backward pass before it had, of a GAN's discriminator first."""
    passes = [each for backward in step.backwards for each in (backward.forward, *backward.others) if each]
    if any(each.wrapped for each in passes):
        return None
    number = next((number for number, each in enumerate(base.steps) if each is step), 0)
    for backward in reversed(base.steps[number - 1].backwards if number else []):
        wrapped = [each for each in (backward.forward, *backward.others) if each and each.wrapped]
        if len(wrapped) == 2 and sum(each.follows for each in wrapped) == 1:
            first, second = sorted(wrapped, key=lambda each: each.follows)
            return second, first
    return None


@beside_one_process(
    why="The gradient is a multiple of the average, which changes the effect of clipping and of the learning rate of SGD.",
    fix="DistributedDataParallel divides the gradients by the number of processes, so do not divide the loss by it too. If you "
    "divide the loss by a count over all ranks, multiply it by the number of processes.",
    anywhere=True,
    origin="call:register_comm_hook receiver:backward",
)
def gradient_scale(run: Run, single: Run) -> Said:
    """The gradient is a multiple of that of one process on the same samples."""
    return findings(gradient_scale, against_one_process, run, single)


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
    if by_hand := _after_backward(run.trained[0]):
        return gradient_scale, Seen(seen, by_hand[0].where, origin="here")
    return gradient_scale, Seen(seen, where)


@rule(
    why="DDP averages the means of the ranks, so a target on a rank with few targets counts more than one on a rank with many.",
    fix="Divide the sum of the losses by the number of targets on all ranks (use all_reduce), and multiply it by the number of "
    "processes, because DistributedDataParallel divides by this number.",
    needs=(LossComputed,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def mean_of_means(run: Run) -> Said:
    """Each loss is the mean over its own targets, whose numbers differ within the step."""
    together = list(zip(*(weighted(process) for process in run.trained), strict=False))
    steps = [[each for backwards in step for each in backwards] for step in together]
    uneven = [] if run.divided or _of_its_own(run) else [step for step in steps if step and _equal_weights(step)]
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
            if len(losses) == 1 and event.loss is not None and losses[0].mean:
                step.append((losses[0], event.loss / losses[0].mean))
            losses = []
        elif isinstance(event, StepBegun):
            steps.append(step)
            step = []
    return steps


def _equal_weights(step: list[tuple[LossComputed, float]]) -> bool:
    """Whether means over different numbers of targets have the same weight."""
    counts = [loss.targets for loss, _ in step]
    factors = [factor for _, factor in step]
    return max(counts) > 1.05 * min(counts) and max(factors) - min(factors) < 0.001 * abs(max(factors))
