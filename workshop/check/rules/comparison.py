"""Whether any program computes with several processes what it computes with one on the same global batches."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from workshop.check.evidence.events import (
    Backward,
    BatchLoaded,
    Collective,
    GradientsClipped,
    Key,
    LossWeighted,
    StepBegun,
    VariablesSeen,
)
from workshop.check.evidence.misuses import LossScaled
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference, different_names, ratio
from workshop.check.rules.gradients import (
    gradient_scale,
    gradients_differ,
    weights_differ,
)
from workshop.check.rules.parts import AFTER, fix_of_scale, has_loader, no_common_step, of_processes, parts_of
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.rules.unequal import before_backward, count_reduced, reduced_losses
from workshop.check.rules.words import listed
from workshop.check.scenarios import COMPARED, WHOLE, Compared

SAME = 0.01  # relative difference of gradients that rounding explains
EQUAL = 5e-5  # the same of losses
PLACE = "factor "  # in place of the name of a variable
STAYS = 3  # steps in which a coefficient must stay different
# The statement that numbers the positive pairs of a contrastive loss, without the place of the rank.
LABELS = r"holds:arange\( text:\b(labels?|targets?)\s*=(?!.*rank).*\barange\("
DRIFT = 0.5  # the most by which a coefficient changes in a step, relative to its value


@gradient_scale.also(COMPARED, active=True, after=AFTER)
def scaled(compared: Compared) -> Said:
    """The gradient of the first step is a multiple of that of one process."""
    factor, where = (None, "") if any(reduced_losses(compared.several)) else _factor(compared)
    processes = compared.several.nproc
    if factor is not None and abs(factor - 1) > 0.03 and (has_loader(compared) or of_processes(factor, processes)):
        seen, count = f"the gradient of step 1 is {factor:.2f} times that of one process on the same samples", None
        if abs(factor * processes - 1) < 0.03:  # as if the loss were divided by a count of all ranks
            count = count_reduced(compared.several.trained[0])
        if count:
            yield Seen(
                f"{seen}; before backward(), {count.name} at {count.where} sums a number over the ranks",
                count.where,
                origin=f"reduced:{count.name}",
            )
        else:
            origin = f"call:TrainingArguments {gradient_scale.origin}" if factor > 1 else ""
            yield Seen(seen, where, fix=fix_of_scale(factor, processes), origin=origin)


@rule(
    why="The loss compares samples of all ranks, so its gradient must be that of one process with all these samples.",
    fix="Gather with torch.distributed.nn.functional.all_gather, which returns gradients to the other ranks. If the labels are "
    "positions in the gathered batch, begin at rank * batch size.",
    runs=COMPARED,
    needs=(GradientsClipped,),
    after=AFTER,
    anywhere=True,
)
def gathered_loss(compared: Compared) -> Said:
    """The ranks exchange values before backward(), and the gradient is not that of one process."""
    if _exchanges(compared.several.trained):
        for seen in _different(compared):
            yield _explained(compared, seen) if isinstance(seen, Seen) else seen


@rule(
    why="The result depends on the number of processes. This is right only if the loss should compare the samples of one rank.",
    fix="If the loss is divided by a count, such as that of the targets, sum this count over all ranks with all_reduce first.",
    runs=COMPARED,
    after=AFTER,
    hint=True,
    anywhere=True,
)
def depends_on_processes(compared: Compared) -> Said:
    """The gradient is not that of one process, and no multiple of it."""
    if reason := _incomparable(compared):
        if not any(parts_of(compared)):
            yield NotJudged(f"{COMPARED.title} ({reason})", goal=False)
    elif not _exchanges(compared.several.trained) and not _of_each_rank(compared.several):
        yield from _different(compared)


@rule(
    why="Each rank minimizes a different loss, and the result depends on the number of processes.",
    fix="Compute the weights of the loss from the whole data set on all ranks, or sum the counts over all ranks with all_reduce "
    "before you compute the weights.",
    needs=(LossWeighted,),
    after=(gradients_differ,),
    instead_of=(depends_on_processes,),
    anywhere=True,
    origin="weights",
)
def loss_weights_differ(run: Run) -> Said:
    """The weight= or pos_weight= of the loss is the same in all steps, but not on all ranks."""
    ranks = [[event for event in process.of(LossWeighted) if event.argument] for process in run.trained]
    if len(ranks) < 2 or not all(ranks):
        return
    constant = all(_alike(event.values, events[0].values) for events in ranks for event in events)
    for other in ranks[1:] if constant else ():
        if len(other[0].values) == len(ranks[0][0].values) and not _alike(other[0].values, ranks[0][0].values):
            yield Seen(_weighted(ranks[0][0].values, other[0].values), ranks[0][0].where)
            return


@rule(
    why="Each rank minimizes a different loss, but DDP averages their gradients, and a checkpoint has the number of one rank.",
    fix="Change this number by a value that is the same on all ranks: average the measured value with all_reduce first.",
    needs=(LossScaled,),
    after=(gradients_differ, weights_differ),
    instead_of=(depends_on_processes,),
    anywhere=True,
)
def coefficient_differs(run: Run) -> Said:
    """A number by which a term of the loss is multiplied begins with the same value on all ranks, and drifts apart."""
    ranks = [_coefficients(process) for process in run.trained] if len(run.trained) > 1 and not run.divided else []
    steps = list(zip(*ranks, strict=False))
    for name in dict.fromkeys(name for of_all in steps for name in of_all[0]):
        values = [[of_one[name] for of_one in of_all] for of_all in steps if all(name in of_one for of_one in of_all)]
        if found := _drift(values):
            shown = " and ".join(f"{value:.4g}" for value in found[:2])
            what = "a number" if name.startswith(PLACE) else f"`{name}`"
            seen = f"the loss is multiplied by {what}, which becomes different on ranks 0 and 1: {shown}"
            origin = "" if name.startswith(PLACE) else f"changed:{name}"
            yield Seen(seen, run.trained[0].step_where, origin=origin)
            return


def _drift(values: list[list[float]]) -> list[float]:
    """The first values that differ between the ranks, given those of each step; none unless the next ones differ too.

    They must be equal at first and change slowly. (A count of the samples of a batch differs in single steps.)
    """
    first = next((number for number, each in enumerate(values) if len(set(each)) > 1), len(values))
    apart = values[first : first + STAYS]
    if (
        not first
        or len(apart) < STAYS
        or not all(len(set(each)) > 1 and not any(map(float.is_integer, each)) for each in apart)
    ):
        return []
    pairs = ((here, there) for one, two in pairwise(values) for here, there in zip(one, two, strict=True))
    return apart[0] if all(abs(here - there) <= DRIFT * abs(here) for here, there in pairs) else []


def _coefficients(process: Process) -> list[dict[str, float]]:
    """For each step, the factors of the loss: by the variables that have their values, and by their places."""
    steps: list[dict[str, float]] = []
    factors: list[float] = []
    numbers: dict[str, float] = {}
    for _, event in process.events:
        if isinstance(event, LossScaled):
            factors = event.factors
        elif isinstance(event, VariablesSeen):
            numbers = event.numbers
        elif isinstance(event, StepBegun):
            of_loss = {f"{factor:.5g}" for factor in factors}
            named = {name: float(value) for name, value in numbers.items() if f"{value:.5g}" in of_loss}
            placed = {f"{PLACE}{number} of {len(factors)}": factor for number, factor in enumerate(factors)}
            steps.append(named | placed)
            factors = []
    return steps


@loss_weights_differ.also(
    (WHOLE, COMPARED),
    active=True,
    needs=(LossWeighted,),
    after=(gradients_differ,),
    instead_of=(depends_on_processes,),
)
def factors_differ(run: Run, compared: Compared) -> Said:
    """The ranks multiply the losses of the samples by different constants, which are not those of one process either."""
    ours = [_factors(process) for process in run.trained]
    alone = [_factors(process) for process in compared.single.trained]
    if _incomparable(compared) or len(ours) < 2 or not all(ours) or not all(alone) or not alone:
        return
    one, other = ours[0], next((values for values in ours[1:] if not _among(ours[0], values)), None)
    if other and not _among(other, one) and not _among(alone[0], [value for values in ours for value in values]):
        where = next(event.where for event in run.trained[0].of(LossWeighted) if not event.argument)
        yield Seen(_weighted(one, other), where)


def _factors(process: Process) -> list[float]:
    """The constants by which the losses of the samples are multiplied, if they are the same in all steps."""
    events = [event.values for event in process.of(LossWeighted) if not event.argument]
    events = [values for values in events if sum(value != 0 for value in values) > 1]  # without the masks of dropout
    most = max(events, key=len, default=[])
    return most if all(_among(values, most) for values in events) else []


def _among(values: list[float], others: list[float]) -> bool:
    """Whether most of these values are among the others."""
    return 2 * sum(any(_alike([value], [other]) for other in others) for value in values) > len(values)


def _alike(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(
        abs(here - there) <= CLOSE * max(abs(here), abs(there)) for here, there in zip(one, other, strict=True)
    )


def _weighted(one: list[float], other: list[float]) -> str:
    texts = [", ".join(f"{value:.3g}" for value in values[:4]) + ", ..." * (len(values) > 4) for values in (one, other)]
    return f"one rank weights the loss with {texts[0]}, another rank with {texts[1]}"


def _incomparable(compared: Compared) -> str:
    """Why the gradients of several processes cannot be compared with those of one; "" if they can be."""
    if reason := no_common_step(compared):
        return reason
    ours, alone = (run.trained[0].steps[0] for run in (compared.several, compared.single))
    if ours.before.sharded or alone.before.sharded:
        return "each process has only a part of the gradients"
    if in_two_views(ours.keys):
        return "a batch has two views of its samples, one after the other, and the check joins the batches of the ranks whole"
    if difference(ours.before.weights, alone.before.weights) > CLOSE:
        return "one process begins with different parameters"
    if compared.several.divided == "experts" and len(ours.before.names) == len(alone.before.names):
        return "one process has fewer experts"
    return ""


def in_two_views(samples: Sequence[Key]) -> bool:
    """Whether a batch has the same samples twice, one half after the other, as for a contrastive loss."""
    half = len(samples) // 2
    return half > 1 and samples[:half] == samples[half:]


def _of_each_rank(run: Run) -> bool:
    """Whether each rank takes its first step with gradients of its own, as in local SGD. (gradients_differ judges this.)"""
    first, *others = (process.steps[0].before.gradients for process in run.trained)
    return any(difference(first, each, least=0.05) > SAME for each in others)


def _factor(compared: Compared) -> tuple[float | None, str]:
    """The factor between the gradients of step 1 before they are clipped, and the line of backward()."""
    if _incomparable(compared):
        return None, ""
    ours, alone = (run.trained[0] for run in (compared.several, compared.single))
    factor = ratio(ours.steps[0].before.gradients, alone.steps[0].before.gradients)
    clips = [process.first(GradientsClipped) for process in (ours, alone)]
    norms = [clip.total for clip in clips if clip and clip.total]
    others = (process.first(GradientsClipped) for process in compared.several.trained)
    own = any(each and each.total and abs(each.total - norms[0]) > CLOSE * norms[0] for each in others if norms)
    if factor is not None and len(norms) == 2 and not own:  # else each rank has the norm of its own gradient
        factor = norms[0] / norms[1]  # clipping may have made both equally large
    return factor, ours.steps[0].backwards[-1].where


def _different(compared: Compared) -> Said:
    factor, where = _factor(compared)
    if _incomparable(compared) or factor is not None or not has_loader(compared):
        return
    ours, alone = (run.trained[0].steps[0].before for run in (compared.several, compared.single))
    if difference(ours.gradients, alone.gradients, least=0.05) > SAME:
        which = listed(different_names(ours.gradients, alone.gradients, ours.names))
        yield Seen(f"on the same samples the gradient of step 1 differs from that of one process ({which})", where)


def _explained(compared: Compared, seen: Seen) -> Seen:
    """The same, with the line of the cause: the labels if the losses differ too, otherwise the function that gathers."""
    ours = [each.loss for process in compared.several.trained for each in process.steps[0].backwards]
    alone = [each.loss for process in compared.single.trained for each in process.steps[0].backwards]
    first = compared.several.trained[0]
    calls = [call for call in before_backward(first, first.steps[0].before) if _of_values(call)]
    if None in ours or None in alone or not ours or not alone:
        return seen
    mean, other = (sum(each or 0 for each in losses) / len(losses) for losses in (ours, alone))
    if abs(mean - other) > EQUAL * max(abs(mean), abs(other)):
        text = f"{seen.text}; the mean of the losses of the ranks is {mean:.6g}, and the loss of one process is {other:.6g}"
        exchange = f" line:{calls[-1].where}" if calls and calls[-1].where and " " not in calls[-1].where else ""
        return replace(seen, text=text, origin=LABELS + exchange)
    gathers = [call for call in calls if call.name.startswith(("all_gather", "all_to_all"))]
    if not gathers:
        return seen
    text = f"{seen.text}, although the losses are the same: the gradients of what the ranks gather are not complete"
    return replace(seen, text=text, where=gathers[-1].where, origin="gathering here")


def _exchanges(ranks: list[Process]) -> bool:
    """Whether more than a number is exchanged between the loading of a batch and its backward pass, after the first step."""
    wanted = BatchLoaded, Collective, Backward
    for process in ranks[:1]:
        events = [event for _, event in process.events if not isinstance(event, Collective) or _of_values(event)]
        kinds = [type(event) for event in events if isinstance(event, (*wanted, StepBegun))]
        later = [kind for kind, _ in groupby(kinds[kinds.index(StepBegun) :])] if StepBegun in kinds else []
        return wanted in zip(later, later[1:], later[2:], strict=False)
    return False


def _of_values(call: Collective) -> bool:
    """Whether a collective exchanges more than a number, such as a count of targets.

    A ring passes on stored values, one gathered number for each sample is a metric, and so is what only one rank gets.
    """
    if (
        call.shape is None
        or call.point_to_point
        or call.name in ("gather", "reduce")
        or (call.name.startswith("all_gather") and len(call.shape) < 2)
    ):
        return False
    return math.prod(call.shape) > 1
