"""Steps of several batches: the same number in each, averaged, and communicated once."""

from itertools import groupby, pairwise
from statistics import mode

from workshop.check.evidence.events import LossComputed, StepBegun, Wrapped
from workshop.check.evidence.misuses import LossCounted, LossScaled
from workshop.check.evidence.process import Process, Step
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules.by_hand import counted_twice
from workshop.check.rules.gradients import against_one_process, beside_one_process, mean_of_means, weighted
from workshop.check.rules.learning import of_steps, wrong_parameters
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rounds import of_its_own
from workshop.check.rules.rule import Said, Seen, findings, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import WHOLE

# The ratio of the numbers of targets of two batches that matters if the program adds them up over the ranks.
APART = 1.02
LEAST = 8  # a count of targets
COUNTED = 1.05  # the same of the counts by which a program divides its losses itself


@of_steps(
    why="A step with more or fewer batches than the others has a gradient of a different scale.",
    fix="Step after every N-th batch, counted from 1: `if (batch + 1) % accumulate == 0`; call zero_grad() after the step only.",
    after=(no_group, wrong_group, wrong_parameters),
    origin="call:Trainer.accumulate_grad_batches|Trainer gate:%",
)
def accumulation_uneven(run: Run) -> Said:
    """The steps have different numbers of batches, or not the number that was asked for."""
    for process in run.trained[:1]:
        if process.optimizers > 1 or process.steps[0].before.sharded:
            continue  # each has its own number of backward passes per step; a library that shards moves the gradients
        if sum(step.after is None for step in process.steps) > 1:
            continue  # L-BFGS calls its closure, which computes gradients, several times per step
        steps = _whole_steps(process.steps)
        sizes = [len(step.backwards) for step in steps]
        wanted = run.asked.accumulate if run.asked else mode(sizes)
        if run.asked is None:
            # zero_grad() clears the gradients of earlier backward passes, for example of a demonstration or a Hessian.
            sizes = [
                wanted if _since_cleared(step) == wanted else size for step, size in zip(steps, sizes, strict=True)
            ]
        if run.asked is None:  # a program may take a last, smaller step with the batches that are left
            sizes = [size for size, left in zip(sizes, _left_over(steps, wanted), strict=True) if not left] or sizes
            if _in_phases(sizes):
                continue
        # A program may try batches of different sizes before its first step.
        own = (step.backwards if run.asked else step.backwards[-wanted:] for step in process.steps)
        cleared = [backward for backwards in own for backward in backwards[1:] if not backward.leftover]
        if set(sizes) != {wanted}:
            number = max(6, next(number for number, size in enumerate(sizes, 1) if size != wanted))
            shown = ", ".join(map(str, sizes[:number])) + (", ..." if len(sizes) > number else "")
            asked = f" ({wanted} were asked for)" if run.asked else ""
            yield Seen(f"batches per step: {shown}{asked}", process.step_where)
        elif wanted > 1 and len(cleared) > len(sizes) // 2:
            seen = "zero_grad() clears the gradients of all batches except the last of each step"
            yield Seen(seen, cleared[0].where, origin="last:zero_grad")
        elif last := 0 if run.cut or run.failed else len(process.trailing):
            yield Seen(f"no optimizer.step() follows the last {plural(last, 'backward() call')}", process.step_where)


def _in_phases(sizes: list[int]) -> bool:
    """Whether the number of batches only changes from one phase of the training to the next, as a schedule of it says."""
    phases = [(size, len(list(same))) for size, same in groupby(sizes)]
    return len(phases) == len(set(sizes)) > 1 and min(steps for _, steps in phases) > 1


def _whole_steps(steps: list[Step]) -> list[Step]:
    """The steps without those that have no backward pass and are of other parameters: ZeRO takes one for each group of them."""
    parts = (
        not step.backwards and last.after is not None and difference(last.after.weights, step.before.weights) > CLOSE
        for last, step in pairwise(steps)
    )
    return [*steps[:1], *(step for step, part in zip(steps[1:], parts, strict=True) if not part)]


def _since_cleared(step: Step) -> int:
    """How many backward passes before a step are not cleared by a later zero_grad()."""
    cleared = [number for number, each in enumerate(step.backwards) if not each.leftover]
    return len(step.backwards) - (cleared[-1] if cleared else 0)


def _left_over(steps: list[Step], wanted: int) -> list[bool]:
    """Whether each step has only the batches that are left at the end of a pass over the loader."""
    passes = [step.backwards[-1].forward and step.backwards[-1].forward.loader for step in steps if step.backwards]
    if len(passes) < len(steps):
        return [False] * len(steps)
    following = [*passes[1:], None]
    return [
        len(step.backwards) < wanted and own is not None and own != next_one
        for step, own, next_one in zip(steps, passes, following, strict=True)
    ]


@beside_one_process(
    why="The gradient of a step must be the mean over its batches. A sum changes the effect "
    "of clipping and of the learning rate of SGD.",
    fix="Divide the loss of each batch by the number of batches per step: (loss / accumulate).backward().",
    anywhere=True,
    origin="returned:training_step receiver:backward",
)
def accumulation_scale(run: Run, single: Run) -> Said:
    """The gradient is the sum over the batches of the step."""
    return findings(accumulation_scale, against_one_process, run, single)


@accumulation_scale.also(WHOLE, active=True, after=(no_group, wrong_group, accumulation_uneven))
def batch_counted_twice(run: Run) -> Said:
    """The program reduces .grad after each batch, adds up the results, and does not clear .grad in between."""
    for count, where in filter(None, map(counted_twice, run.first_rank)):
        seen = f"the program reduces the gradients after each of the {count} batches of a step and adds up the results, but "
        seen += f".grad still contains those of the earlier batches: the first batch counts {count} times"
        fix = "Set the gradients to None after each reduction, as optimizer.zero_grad(set_to_none=True) does."
        yield Seen(seen, where, fix=fix, origin="reduced:reduce_scatter_tensor reduced:all_reduce here")


@rule(
    why="The gradient of a step is then the mean over its batches divided by their number once more, so it is too small.",
    fix="Divide the loss by the number of batches per step only once: accelerator.backward() and the engine of DeepSpeed already "
    "do so.",
    needs=(LossComputed,),
    after=(no_group, wrong_group, accumulation_uneven, mean_of_means),
    anywhere=True,
)
def divided_twice(run: Run) -> Said:
    """The gradients come from the mean loss divided by the square of the number of batches per step."""
    for process in run.trained[:1]:
        factors = [(len(step), factor) for step in weighted(process) for _, factor in step]
        if len(factors) >= 8 and all(number > 1 and abs(factor * number**2 - 1) < 1e-3 for number, factor in factors):
            number = factors[0][0]
            seen = f"a step has {number} batches, and backward() starts from the mean loss of a batch divided by {number**2}"
            yield Seen(seen, process.backwards[0].where)


@mean_of_means.also(WHOLE, active=True, needs=(LossComputed,), after=(no_group, wrong_group))
def batches_of_equal_weight(run: Run) -> Said:
    """Each batch of a step divides by its own targets on all ranks: a target counts more in a batch that has few of them."""
    together = [step for step in zip(*map(weighted, run.trained), strict=False) if len({*map(len, step)}) == 1]
    uneven = [step for step in together if len(step[0]) > 1 and _weighs_alike([*zip(*step, strict=True)])]
    if run.divided or not uneven or len(uneven) <= len(together) / 2:
        return
    counts = [sum(loss.targets for loss, _ in batch) for batch in zip(*uneven[0], strict=True)]
    seen = f"the batches of a step have {min(counts):,} to {max(counts):,} targets on all ranks, and all have the same weight"
    fix = (
        "Divide the sum of the losses of each batch by the number of targets in all batches of the step, on all ranks."
    )
    yield Seen(seen, run.trained[0].backwards[0].where, fix=fix, origin="divisor")


@mean_of_means.also(WHOLE, active=True, needs=(LossCounted,), after=(no_group, wrong_group))
def own_counts(run: Run) -> Said:
    """Each rank divides its loss by a count of its own, and DistributedDataParallel gives the quotients the same weight."""
    base = run.trained[0] if run.trained else None
    if base is None or run.divided or of_its_own(run) or any(mean_of_means.detectors[0].function(run)):
        return
    sharded = base.steps[0].before.sharded if base.steps else False
    if not (sharded or base.first(Wrapped)) or _weighs_by_hand(run.trained):
        return
    steps = [[each for own in step for each in own] for step in zip(*map(_counts, run.trained), strict=False)]
    steps = [step for step in steps if step]
    for place in range(max((len(each) for step in steps for each in step), default=0)):
        uneven = [each for step in steps if (each := _at(place, step)) and max(each) > COUNTED * min(each)]
        if len(uneven) > len(steps) / 2:
            least, most = min(uneven[0]), max(uneven[0])
            seen = (
                f"in a step the losses are divided by counts from {least:,} to {most:,}, and all have the same weight"
            )
            yield Seen(seen, base.backwards[0].where, origin="divisor")
            return


def _counts(process: Process) -> list[list[list[int]]]:
    """For each step, the counts by which the loss of each backward pass is divided; [] if each sample may have its own one."""
    found: list[list[list[int]]] = [[]]
    for _, event in process.events:
        if isinstance(event, LossCounted):
            found[-1].append(event.counts)
        elif isinstance(event, StepBegun):
            found.append([])
    steps = found[:-1][-len(process.steps) :]  # without a warmup
    for counts, step in zip(steps, process.steps, strict=False):
        samples = len(step.keys) // max(1, len(step.backwards))
        own = [len(each) < (samples or len(each) + 1) for each in counts]
        # A smaller number may be that of random iterations, whose mean is meant.
        counts[:] = [[n for n in each if n >= max(samples, LEAST)] * own for each, own in zip(counts, own, strict=True)]
    return steps


def _at(place: int, step: list[list[int]]) -> list[int]:
    """The counts in one place, if all backward passes of a step have as many counts."""
    return [each[place] for each in step] if len({*map(len, step)}) == 1 and place < len(step[0]) else []


def _weighs_by_hand(ranks: list[Process]) -> bool:
    """Whether the ranks also multiply their losses by different factors, which may make up for the counts."""
    events = ([each.factors for each in process.of(LossScaled)] for process in ranks)
    fractions = ([[value for value in each if not value.is_integer()] for each in factors] for factors in events)
    return any(len({*map(tuple, each)}) > 1 for each in zip(*fractions, strict=False))


def _weighs_alike(batches: list[tuple[tuple[LossComputed, float], ...]]) -> bool:
    """Whether the targets of a batch have the same weight on all ranks, and the batches too, although their sizes differ."""
    totals = [sum(factor for _, factor in batch) for batch in batches]
    counts = [sum(loss.targets for loss, _ in batch) for batch in batches]
    each = [[factor / max(1, loss.targets) for loss, factor in batch] for batch in batches]
    inside = all(max(weights) - min(weights) < CLOSE * abs(max(weights)) for weights in each)
    alike = max(totals) - min(totals) < CLOSE * abs(max(totals))
    uneven_ranks = any(len({loss.targets for loss, _ in batch}) > 1 for batch in batches)
    return inside and alike and uneven_ranks and max(counts) > APART * min(counts)


@rule(
    why="DDP communicates the gradients after every batch, although one all-reduce per step is enough.",
    fix="Run forward and backward of all batches except the last of each step under `with ddp_model.no_sync():`.",
    after=(no_group, wrong_group, accumulation_uneven),
    anywhere=True,
)
def accumulation_traffic(run: Run) -> Said:
    """DDP averages the gradients more than once per step."""
    for process in run.trained[:1]:
        # Several optimizers may divide the parameters of one model: then only the first of their steps follows a backward pass.
        steps = [step for step in process.steps if step.backwards]
        if process.optimizers > 1 and len(steps) * process.optimizers > len(process.steps) + process.optimizers:
            continue
        wanted = run.asked.accumulate if run.asked else mode(len(step.backwards) for step in steps)
        used = [step.backwards[-_since_cleared(step) :] for step in steps]
        synced = max(sum(1 for each in backwards if each.sync) for backwards in used)
        if run.asked is None and all(map(_of_one_batch, steps)):
            continue  # an adversarial step, for example, needs the averaged gradient of its first pass for its second one
        if wanted > 1 and run.nproc > 1 and process.first(Wrapped) and synced > 1:
            seen = f"the gradients are averaged {synced} times in a step of {plural(wanted, 'batch')}"
            first = steps[0].backwards[0]
            # If no_sync() was called before it, the forward pass was outside: this call must begin earlier.
            yield Seen(seen, first.unsynced or first.where, origin="here" if first.unsynced else "sync")


@accumulation_traffic.also(WHOLE, after=(no_group, wrong_group))
def wrapped_twice(run: Run) -> Said:
    """A model that is already in DistributedDataParallel is put into it once more."""
    for process in run.trained[:1] if run.nproc > 1 else []:
        known: set[tuple[str, ...]] = set()
        for event in process.of(Wrapped):
            inner = tuple(name.removeprefix("module.") for name in event.names)
            if inner != event.names and inner in known:
                seen = "the model is already in DistributedDataParallel, and here it is put into it again: all gradients are "
                fix = "Wrap the model once: accelerator.prepare() and Lightning do so themselves."
                yield Seen(f"{seen}averaged twice in each step", event.where, fix=fix)
            known.add(event.names)


def _of_one_batch(step: Step) -> bool:
    """Whether all backward passes of a step are about the same samples."""
    batches = {frozenset(each.forward.rows) for each in step.backwards if each.forward}
    return len(batches) == 1 and any(batches)
