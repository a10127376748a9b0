"""Options that trade memory for speed: each has an effect, and none changes the result."""

import math
from functools import partial

from workshop.check.evidence.events import ActivationsKept, Compiled, FineTuningReported, FullySharded, GradientsClipped
from workshop.check.evidence.run import Run
from workshop.check.evidence.text import OptionRuns
from workshop.check.rules.accumulation import accumulation_scale, accumulation_traffic, accumulation_uneven
from workshop.check.rules.ending import ending
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.sharding import first_step, losses, unequal
from workshop.check.rules.words import plural
from workshop.check.scenarios import OPTIONS

_of_options = partial(rule, runs=OPTIONS, needs=(ActivationsKept, FineTuningReported, FullySharded))


def _judged(option: str, run: Run, plain: Run, missing: str, where: str = "") -> Said:
    """Whether a run with an option fails, has different losses than without it, or lacks the effect (``missing``)."""
    if ended := ending(run):
        yield Seen(f"with {option}: {ended.text}", ended.where, ended.detail)
    elif not run.trained:
        yield Seen(f"with {option} it takes no step")
    elif seen := unequal(losses(run), losses(plain)):
        yield Seen(f"with {option} {seen} without it")
    elif missing:
        yield Seen(f"with {option} {missing}", where)


@_of_options(
    why="Activations grow with batch size and sequence length, and are often the first to exceed the memory.",
    fix="Call each layer through torch.utils.checkpoint.checkpoint(use_reentrant=False); set this up before fully_shard.",
    origin="call:fully_shard",
)
def activations_kept(runs: OptionRuns) -> Said:
    """With activation checkpointing the forward pass keeps about the same amount of memory."""
    pair = (runs.plain, runs.checkpointing)
    before, after = (next((event.bytes / 1e6 for event in run.all(ActivationsKept)), 0.0) for run in pair)
    kept = f"a forward pass keeps {after:.2f} MB for the backward pass, but {before:.2f} MB without it"
    return _judged("--activation-checkpointing", pair[1], pair[0], kept if after >= 0.75 * before else "")


@_of_options(
    why="Parameters that are freed after the forward pass are gathered a second time for the backward pass.",
    fix="Pass reshard_after_forward=False to fully_shard.",
    origin="call:fully_shard",
)
def gathers_again(runs: OptionRuns) -> Said:
    """With --keep-gathered the backward pass gathers again."""
    before, after = (len(first_step(run, "all_gather")) for run in (runs.plain, runs.keeping))
    again = f"a step gathers parameters {after} times, but {before} times without it" if after >= before else ""
    return _judged("--keep-gathered", runs.keeping, runs.plain, again)


@_of_options(
    why="Parameters, gradients and optimizer state use memory of the device, although CPU memory could hold them.",
    fix="Pass offload_policy=CPUOffloadPolicy() to every call of fully_shard.",
)
def not_offloaded(runs: OptionRuns) -> Said:
    """With --offload some groups stay on the device."""
    groups = [event for process in runs.offloading.trained[:1] for event in process.of(FullySharded)]
    left = [group for group in groups if group.offload != "CPUOffloadPolicy"]
    kept = f"{len(left)} of {plural(len(groups), 'group')} keep their parameters on the device" if left else ""
    return _judged("--offload", runs.offloading, runs.plain, kept, left[0].where if left else "")


@_of_options(
    why="Each small kernel reads its inputs from memory and writes its results there; fused kernels avoid most of this.",
    fix="Call layer.compile() on each layer before fully_shard.",
    origin="call:compile",
)
def not_compiled(runs: OptionRuns) -> Said:
    """With --compile nothing is compiled."""
    missing = "" if any(runs.compiling.all(Compiled)) else "nothing is compiled"
    return _judged("--compile", runs.compiling, runs.plain, missing)


@accumulation_uneven.also(OPTIONS)
def half_batches_uneven(runs: OptionRuns) -> Said:
    """With --accumulate 2 a step does not have two batches."""
    run = runs.accumulating
    batches = [len(step.backwards) for process in run.trained[:1] for step in process.steps]
    uneven = "" if set(batches) == {2} else f"the steps have {', '.join(map(str, batches))} batches"
    where = run.trained[0].step_where if run.trained else ""
    return _judged("--accumulate 2", run, run, uneven, where)  # half_batches_scaled compares the losses


@accumulation_scale.also(OPTIONS, needs=(FineTuningReported, GradientsClipped), after=(accumulation_uneven,))
def half_batches_scaled(runs: OptionRuns) -> Said:
    """With --accumulate 2 loss or gradient differ from those of the whole batch."""
    step = runs.accumulating.trained[0].steps[0]
    whole, half = _norm(runs.plain), _norm(runs.accumulating)
    if seen := unequal(losses(runs.accumulating), losses(runs.plain)):
        yield Seen(f"with --accumulate 2 {seen} with the whole batch", step.before.where)
    elif whole and abs(half / whole - 1) > 0.1:
        seen = f"with --accumulate 2 the norm of the first gradient is {half:.3f}, but {whole:.3f} with the whole batch"
        yield Seen(seen, step.backwards[0].where)


def _norm(run: Run) -> float:
    """Return the norm of the gradient over all ranks before the first clipping; 0.0 if it is not known."""
    clips = [process.first(GradientsClipped) for process in run.trained]
    return math.hypot(*(norm for clip in clips if clip for norm in clip.norms)) if all(clips) else 0.0


@accumulation_traffic.also(OPTIONS, after=(accumulation_uneven, accumulation_scale))
def half_batches_communicated(runs: OptionRuns) -> Said:
    """A step of two batches reduces its gradients more often than a step of one."""
    once, twice = (len(first_step(run, "reduce_scatter")) for run in (runs.plain, runs.accumulating))
    if twice > once:
        seen = f"a step of 2 batches reduces gradients {twice} times, a step of one batch {once} times"
        yield Seen(seen, runs.accumulating.trained[0].steps[0].backwards[0].where)
