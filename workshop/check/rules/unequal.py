"""Why two ranks hold different gradients before the same step."""

import math
from collections.abc import Sequence

from workshop.check.evidence.events import (
    AcceleratorCalled,
    Backward,
    Collective,
    Forward,
    GradientsClipped,
    NotAwaited,
    Sketch,
    StepBegun,
    Wrapped,
)
from workshop.check.evidence.misuses import GradientsIgnored, LossReduced
from workshop.check.evidence.process import Process, Step
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE
from workshop.check.rules.divergence import TO_ONE, collectives_since
from workshop.check.rules.words import listed

IGNORING = "_set_params_and_buffers_to_ignore_for_model"
FEW = 8  # elements of a tensor of counts


def unclipped(process: Process, begun: StepBegun) -> list[Sketch]:
    """The gradients of a step before ``clip_grad_norm_()`` scaled all of them; as they are if it did not."""
    clips: list[GradientsClipped] = []
    for _, event in process.events:
        if event is begun:
            break
        if isinstance(event, StepBegun):
            clips = []
        elif isinstance(event, GradientsClipped):
            clips.append(event)
    present = [each[0] for each in begun.gradients if each]
    if len(clips) != 1 or len(clips[0].norms) != len(present):
        return begun.gradients
    factors = [norm / now for norm, now in zip(clips[0].norms, present, strict=True) if norm and now]
    if not factors or not max(factors) <= min(factors) * (1 + CLOSE):  # those of other parameters, or NaN
        return begun.gradients
    return [each and (each[0] * factors[0], [value * factors[0] for value in each[1]]) for each in begun.gradients]


def why_unequal(base: Process, one: Step, two: Step, which: Sequence[str]) -> tuple[str, ...]:
    """The line to look at, why the gradients are not averaged, what to do ("": the fix of the rule), and the origin, if any.

    ``which``: the names of the parameters with different gradients.
    """
    where, some = one.before.where, len(which) < len(one.before.names)
    last = one.backwards[-1] if one.backwards else None
    if not base.first(Wrapped):
        return _unequal_by_hand(base, one)
    if ignored := next((each for each in base.of(GradientsIgnored) if set(which) <= set(each.names)), None):
        fix = "Do not let DistributedDataParallel ignore parameters that all ranks have, or average their gradients yourself."
        return ignored.where, f"{IGNORING}() lets DistributedDataParallel ignore them", fix, f"call:{IGNORING}"
    if last and (passed := _passed_before(base, one)):
        second, first = passed
        reason = (
            f"an earlier backward() also goes through the forward pass at {first.where}, so DistributedDataParallel averages its "
            "gradients there, and not in this step"
        )
        return second.where, reason, "Call detach() on the output of the first model in the loss of the second model."
    if last and last.forward and not last.forward.wrapped:
        if (some and _outside(base, one.before.names, which)) or _of_another_model(base, which):
            fix = "Wrap the module that has all trained parameters in DistributedDataParallel, and call this wrapper."
            return (
                last.forward.where,
                "these parameters are not in the module that DistributedDataParallel wraps",
                fix,
                "model",
            )
        fix = "Call the wrapper of DistributedDataParallel in the forward pass, not the model inside it (`.module`)."
        bypasses = "the forward pass bypasses DistributedDataParallel: call the wrapper"
        return last.forward.where, bypasses, fix, "argument:backward"
    if last and last.sync is False:
        return _without_sync(base, last)
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
    if last.forward and last.forward.wrapped and (added := _added(base, which)):
        fix = "First complete the model (new layers, adapters, unfrozen layers), and then wrap it in DistributedDataParallel. "
        fix += "Also wrap each further module that has parameters, such as a loss."
        what = f"DistributedDataParallel does not average {listed(added)}: they were added or unfrozen after it had wrapped the "
        what += "model, or belong to another module"
        origin = f"owner:{added[0]}" if "." not in added[0] else "here"
        return next((each.where for each in base.of(Wrapped)), where), what, fix, origin
    what = "something changes them on one rank after backward(), or they were averaged before they were complete"
    return (
        where,
        what,
        "Call backward() once for each forward pass of the wrapper, and change gradients on all ranks alike.",
    )


def _without_sync(base: Process, last: Backward) -> tuple[str, ...]:
    """Why the last backward pass before a step averages nothing: no_sync(), or what sets the same by hand."""
    if unprepared := _without_optimizer(base):
        reason = "accelerator.prepare() does not get the optimizer, so it also steps after a backward() that averages nothing"
        fix = "Pass the optimizer to accelerator.prepare() too: in accumulate(), it then steps only with averaged gradients."
        return unprepared, reason, fix
    fix = "Run the forward pass and backward() of the last batch of each step outside no_sync()."
    if last.unsynced:
        return last.unsynced, "the last backward() before the step is under no_sync()", fix, "sync"
    fix = "Set require_backward_grad_sync to True before the forward pass of the last batch of each step."
    return last.where, "require_backward_grad_sync is False in the last forward pass before the step", fix, "sync"


def _without_optimizer(process: Process) -> str:
    """The line where a program prepares its model with Accelerate, if it never prepares an optimizer; "" otherwise."""
    prepared = [each for each in process.of(AcceleratorCalled) if each.name == "prepare"]
    return prepared[0].where if prepared and not any("Optimizer" in each.of for each in prepared) else ""


def _outside(process: Process, names: Sequence[str], which: Sequence[str]) -> bool:
    """Whether these parameters are in no wrapped module, and others of the same model are in one."""
    wrapped = tuple(f"module.{name}" for event in process.of(Wrapped) for name in event.names)
    inside = {name for name in names if name.endswith(wrapped)}
    return bool(inside) and inside.isdisjoint(which)


def _of_another_model(process: Process, names: Sequence[str]) -> bool:
    """Whether no wrapped module has parameters with these names."""
    wrapped = tuple(f".{name}" for event in process.of(Wrapped) for name in event.names)
    # A part of the wrapped model that is called alone has shorter names.
    return not any(f".{name}".endswith(wrapped) or any(each.endswith(f".{name}") for each in wrapped) for name in names)


def _added(process: Process, names: Sequence[str]) -> list[str]:
    """Those of these parameters that no wrapped module had when it was wrapped."""
    wrapped = {name for event in process.of(Wrapped) for name in event.names}
    endings = tuple(f"module.{name}" for name in wrapped)
    return [name for name in names if name not in wrapped and not name.endswith(endings)]


def _unequal_by_hand(base: Process, one: Step) -> tuple[str, ...]:
    """The same for a program without a wrapper."""
    where = one.before.where
    averaging = {each.where for each in after_backward(base)}
    if lost := next((each for each in base.of(NotAwaited) if each.where in averaging), None):
        fix = "Keep the handle that the call with async_op=True returns, and call its wait() before you use the result."
        return lost.where, f"nothing waits for the asynchronous {lost.name} before the step", fix
    if not averaging:
        what = "nothing averages them, because the model is not wrapped in DistributedDataParallel"
        passes = [each.forward.where for each in one.backwards if each.forward]
        return (passes[-1] if passes else where), what, "", "call:DataParallel model"
    calls = collectives_since(base, Backward, one.before)
    if calls and all(call.name == "reduce" for call in calls):
        return calls[0].where, "reduce() gives the sum to one rank only", TO_ONE
    return (
        calls[0].where if calls else where,
        "not all of them are averaged",
        "Average the gradients of all parameters with all_reduce before each step.",
        "averaged",
    )


def after_backward(process: Process) -> list[Collective]:
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


def reduced_losses(run: Run) -> list[LossReduced]:
    """The reductions of a loss that then is divided by the number of processes, although the gradients are averaged."""
    events = run.trained[0].of(LossReduced) if run.trained and run.nproc > 1 else []
    averaged = any(process.first(Wrapped) or after_backward(process) for process in run.trained[:1])
    return [each for each in events if averaged and abs(each.factor * run.nproc - 1) < 0.01]


def before_backward(process: Process, step: StepBegun) -> list[Collective]:
    """The collectives between the step before this one and the last backward pass of this one."""
    found: list[Collective] = []
    until: list[Collective] = []
    for _, event in process.events:
        if event is step:
            break
        if isinstance(event, StepBegun):
            found, until = [], []
        elif isinstance(event, Collective):
            until.append(event)
        elif isinstance(event, Backward):
            found += until
            until = []
    return found


def count_reduced(process: Process) -> Collective | None:
    """The last number that is reduced before the backward passes of the first step, and also of the second one."""
    first, *later = [before_backward(process, step.before) for step in process.steps[:2]]
    again = {call.where for calls in later for call in calls}
    small = [
        call for call in first if call.name.startswith(("all_reduce", "reduce")) and math.prod(call.shape or ()) < FEW
    ]
    return next((call for call in reversed(small) if call.where in again), None)


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


COPY_BACK = (
    "Copy what broadcast() has received into the parameters, for example with torch.nn.utils.vector_to_parameters(): the vector "
    "is a copy of them."
)


def vector_sent(process: Process) -> str:
    """The line of the last broadcast of a vector before the first step, if there is no other broadcast of floats; else ""."""
    found: dict[str, set[int]] = {}
    for _, event in process.events:
        if isinstance(event, StepBegun):
            break
        if isinstance(event, Collective) and event.name == "broadcast" and "float" in event.dtype:
            found.setdefault(event.where, set()).add(len(event.shape or ()))
    return next(iter(found), "") if list(found.values()) == [{1}] else ""
