"""Whether the parts of a gradient that the ranks have, of a divided or sharded model, make up the gradient of one process."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from workshop.check.evidence.events import BatchLoaded, Key, Sketch, StepBegun
from workshop.check.evidence.process import Process
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules.gradients import (
    buffers_differ,
    clipping_differs,
    gradient_scale,
    gradients_differ,
    mean_of_means,
    models_differ,
    weights_differ,
)
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import listed
from workshop.check.scenarios import COMPARED, Compared

AFTER = (gradients_differ, weights_differ, models_differ, buffers_differ, mean_of_means)
IGNORED = (
    "FSDP neither shards nor averages what is in ignored_modules or ignored_params. Let FSDP wrap this layer too, for example "
    "with a MixedPrecision of its own, or average its gradients with all_reduce() before the step."
)
TOO_LARGE = (
    "If you add up the gradients of the ranks, divide the sum by the number of processes. Do not multiply the loss by it. The "
    "Trainer of transformers does so for models that ignore num_items_in_batch: set average_tokens_across_devices=False."
)
WRAPPED = "_fsdp_wrapped_module."  # in the names of FSDP1
IGNORING = " ".join(
    f"call:{name}.{argument}"
    for name in ("FullyShardedDataParallel", "FSDP", "fully_shard")
    for argument in ("ignored_modules", "ignored_states", "ignored_params")
)
LEAST = 1e-3  # share of the largest norm; a smaller gradient can be a rounding error
FIRST = 4  # steps, of several optimizers
SCALE = 0.03  # relative difference of a norm that rounding in bfloat16 explains


class _Part(NamedTuple):
    """A parameter of the first step of its optimizer."""

    name: str
    divided: bool  # each rank has a part of it; otherwise all have all of it
    gradients: list[Sketch]  # of the ranks
    factor: float  # of the norm of the whole gradient, to that of one process


@rule(
    why="Parameters that all ranks have must get the same gradient on all of them. Otherwise they drift apart.",
    fix="Each rank has only a part of this gradient: sum it over the ranks that divide the model. Call the layer before the "
    "operation whose backward pass calls all_reduce, or call all_reduce() for its gradients before the step.",
    runs=COMPARED,
    after=(no_group, wrong_group, gradients_differ),
    anywhere=True,
)
def replicas_differ(compared: Compared) -> Said:
    """Ranks that divide a model have different gradients of a parameter that all of them have."""
    parts = list(parts_of(compared))
    off = [
        each
        for each in parts
        if not each.divided and any(difference(each.gradients[:1], [other]) > SCALE for other in each.gradients[1:])
    ]
    if off and any(each.divided for each in parts):
        norms = " and ".join(f"{each[0]:.4g}" for each in off[0].gradients[:4] if each)
        names = listed([f"`{each.name.replace(WRAPPED, '')}`" for each in off])
        seen = f"all ranks have the same {names}, but different gradients of it, for example with the norms {norms}"
        layer, step = off[0].name.split(".")[-2:][0], compared.several.trained[0].steps[0]
        fix, origin = (IGNORED, IGNORING) if step.before.sharded else ("", rf"call:.\.{layer}$")
        yield Seen(seen, step.backwards[-1].where, fix=fix, origin=origin)


@rule(
    why="The parameters of which each rank has a part then learn at a different rate than the others, and it depends on the "
    "number of processes.",
    fix="A rank that owns a part gets the sum of the gradients of all ranks, for example from the backward pass of all_to_all, "
    "but DistributedDataParallel averages. Divide the gradients of these parts by the number of processes too.",
    runs=COMPARED,
    after=(no_group, wrong_group, replicas_differ, clipping_differs, *AFTER),
    anywhere=True,
)
def gradient_of_parts(compared: Compared) -> Said:
    """The norm of a gradient of which each rank has a part is a multiple of that of one process."""
    parts = list(parts_of(compared))
    off = [each for each in parts if each.divided and abs(each.factor - 1) > SCALE]
    factors = [each.factor for each in off]
    if not off or max(factors) > (1 + SCALE) * min(factors):
        return
    if _made_up_for(compared, factors[0]):
        return
    whole = len(off) == len([each for each in parts if each.divided])
    if not (whole and has_loader(compared)) and not of_processes(factors[0], compared.several.nproc):
        return
    of = "the parameters that the ranks divide" if whole else listed([f"`{each.name}`" for each in off])
    seen = f"the gradient of {of} has {factors[0]:.2f} times the norm that it has in one process with the same samples"
    fix = "" if len(off) < len(parts) else fix_of_scale(factors[0], compared.several.nproc)
    yield Seen(seen, compared.several.trained[0].steps[0].backwards[-1].where, fix=fix)


def _made_up_for(compared: Compared, factor: float) -> bool:
    """Whether a learning rate is as many times smaller than in one process, as that of a table with the sum of all gradients."""
    several, single = (run.trained[0].steps[:FIRST] for run in (compared.several, compared.single))
    pairs = [
        pair
        for steps in zip(several, single, strict=False)
        for pair in zip(*(each.before.rates for each in steps), strict=False)
    ]
    return any(alone and abs(rate / alone * factor - 1) < SCALE for rate, alone in pairs)


def fix_of_scale(factor: float, processes: int) -> str:
    """What to do if a gradient is this multiple of that of one process."""
    return TOO_LARGE if abs(factor / processes - 1) < SCALE else gradient_scale.fix


def parts_of(compared: Compared) -> Iterator[_Part]:
    """Yield the parameters whose gradients can be compared; none if the first steps are not comparable."""
    several, single = compared.several.trained, compared.single.trained
    if len(several) < 2 or no_common_step(compared):
        return
    alone = dict(_firsts(single[0]))
    ranks = [dict(_firsts(process)) for process in several]
    for key, one in alone.items():
        together = [found[key] for found in ranks if key in found and found[key].names == one.names]
        if len(together) < len(ranks):
            return
        largest = max((each[0] for each in one.gradients if each), default=0.0)
        for number, name in enumerate(one.names):
            weights = [step.weights[number] for step in together]
            gradients = [step.gradients[number] for step in together]
            of_one, due = one.weights[number], one.gradients[number]
            if not (of_one and due and due[0] > LEAST * largest):
                continue
            same = all(difference(weights[:1], [each]) <= CLOSE for each in weights[1:])
            as_whole = same and _near(_norm(weights[:1]), of_one[0])
            in_parts = _near(_norm(weights), of_one[0])
            if as_whole == in_parts:  # both: only zeros
                if not as_whole:
                    return
                continue
            factor = _norm(gradients if in_parts else gradients[:1]) / due[0]
            yield _Part(name or "?", in_parts, gradients, factor)


def no_common_step(compared: Compared) -> str:
    """Why the first step of one process is not that of several with the same samples; "" if it is."""
    several, single = compared.several.trained, compared.single.trained
    if len(single) > 1:
        return "the program itself starts several processes"
    if not several or not single or compared.several.failed or compared.single.failed:
        return "one process fails with the joined batches of all ranks, or takes no step"
    ours, alone = several[0].steps[0], single[0].steps[0]
    rows = [Counter(row for process in ranks for row in process.steps[0].rows) for ranks in (several, single)]
    same = rows[0].total() == rows[1].total() if compared.narrow else _same_samples(*rows)
    if not rows[0] or not same or len(ours.backwards) != len(alone.backwards):
        return "the first step of one process has other samples than that of all ranks together"
    return ""


def has_loader(compared: Compared) -> bool:
    """Whether the samples come from a loader. Otherwise they are all the same, and only large differences mean something."""
    return any(compared.several.all(BatchLoaded))


def of_processes(factor: float, processes: int) -> bool:
    """Whether a factor is the number of processes, or one divided by it."""
    return any(abs(factor / each - 1) < SCALE for each in (processes, 1 / processes))


def _same_samples(of_all: Counter[Key], of_one: Counter[Key]) -> bool:
    """Whether the ranks have the samples of one process. Without a loader and chance, each may have the same ones."""
    times = {of_all[key] / number for key, number in of_one.items()}
    return of_all.keys() == of_one.keys() and len(times) == 1


def _firsts(process: Process) -> Iterator[tuple[tuple[str, int], StepBegun]]:
    """Yield the first step of each optimizer, by the line that made it and the number of its parameters."""
    seen: set[tuple[str, int]] = set()
    for step in process.steps:
        key = step.before.made, len(step.before.names)
        if key not in seen:
            seen.add(key)
            yield key, step.before


def _norm(sketches: list[Sketch]) -> float:
    """The norm of a tensor of which these are the parts. (A rank can have no part of a small one.)"""
    return math.hypot(*(each[0] for each in sketches if each))


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=1e-12)
