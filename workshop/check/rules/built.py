"""Programs that build a parallelism by hand (stage 06): what they compute, send and hold."""

from collections.abc import Iterator

from workshop.check.evidence.events import BuildReported, FullySharded, StepTraced, Wrapped
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import ending
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.rules.traced import GATHERS, TracedStep, judging, mib, needs_more, of_step, size_of
from workshop.check.rules.tried import case_rule, instead
from workshop.check.rules.words import plural
from workshop.check.scenarios import BUILT_ALONE, WHOLE

CLOSE = 1e-9  # between losses in float64 after a few steps
MOST_CALLS = 20  # of the 52 parameters of the model
MANY = 4  # messages of an optimizer step, for each rank that sends some
MOMENTS = 2  # values that AdamW stores for each element
TWICE = 1.3  # the most that a rank may send, as a multiple of what is needed
MORE = 0.1  # of the whole: how much more than its share a rank may hold
KEPT = 0.9  # of the parameters: the most that a pass may add to what a rank always holds; two layers need 0.5
EARLY = 0.2  # of the gradients: the least that must be sent before the backward pass reaches the first of 4 layers


# ---------------------------------------------------------------- equal to one process


@rule(
    why="Several processes must compute what one process computes with the same global batches.",
    fix="Run one step (--dtype float64 --steps 1) with torchrun --nproc-per-node=1 and with 2, and compare the gradients.",
    runs=(WHOLE, BUILT_ALONE),
    needs=(BuildReported,),
    spoils=True,
)
def built_differs(run: Run, alone: Run) -> Said:
    """The losses are not those of one process."""
    if ended := ending(alone):
        yield Seen(f"with one process: {ended.text}", ended.where, ended.detail)
        return
    ours, theirs = ([loss for process in each.ranks[:1] for event in process.of(BuildReported) for loss in event.losses]
                    for each in (run, alone))  # fmt: skip
    if not ours or not theirs:
        yield NotJudged("whether one process computes the same: the program reported no losses with Log.step()")
    for number, (our, their) in enumerate(zip(ours, theirs, strict=False), 1):
        if not abs(our - their) < CLOSE:
            size = len(run.ranks)
            yield Seen(f"the loss of step {number} is {our:.10f} with {size} processes, but {their:.10f} with one")
            return


case_rule(
    __name__,
    "start_unequal",
    "Ranks that start with different parameters average the gradients of different models.",
    "In __init__, send each parameter and each buffer of the first rank with torch.distributed.broadcast.",
    "start",
)
case_rule(
    __name__,
    "case_fails",
    "A class that works only for the model of the exercise fails with your own models.",
    "Handle parameters that are tied, frozen, unused, or used by some ranks only: all ranks must call the same "
    "collectives, and a gradient that no rank has must stay None. The gradients of several backward passes must add up.",
    "odd", "no-gradient", "twice",
)  # fmt: skip
case_rule(
    __name__,
    "change_unnoticed",
    "The gradient of a parameter that was replaced later is not averaged, so the ranks train different models silently.",
    "In forward(), compare describe(module) with its result in __init__(), and raise a ValueError with the name of the "
    "changed parameter.",
    "changed",
)
optimizer_case_fails = case_rule(
    __name__,
    "optimizer_case_fails",
    "A sharded optimizer must do what its class does in one process.",
    "Pass all options to the inner optimizer. Before each step, copy the options in param_groups, which a schedule of "
    "the learning rate changes.",
    "other-class", "scheduled",
)  # fmt: skip
state_uneven = case_rule(
    __name__,
    "state_uneven",
    "The rank with the largest part determines how much memory each GPU needs.",
    "Give each parameter, the largest first, to the rank with the fewest elements so far, as ZeroRedundancyOptimizer "
    "does.",
    "shares",
)
case_rule(
    __name__,
    "state_partial",
    "A checkpoint with the state of one rank lacks the optimizer state of the other parameters, so the run cannot resume.",
    "In state_dict(), collect the states of all ranks with torch.distributed.all_gather_object. In load_state_dict(), "
    "keep only the states of the parameters that this rank updates.",
    "saved", "loaded", "loaded-part",
    after=(built_differs, optimizer_case_fails),
)  # fmt: skip
case_rule(
    __name__,
    "shards_fail",
    "A class that works only for the model of the exercise fails with your own models.",
    "Pad the shards of all ranks to the same size, sum gradients in the type of the shards, gather again after each "
    "step, and call the same collectives on all ranks, also for parameters that only some ranks have used. A gradient "
    "that no rank has must stay None.",
    "odd", "no-gradient", "uneven-sizes", "precision", "old-parameters",
)  # fmt: skip


def _zero(run: Run) -> Iterator[str]:
    of = (each.optimizers.items() for each in run.all(StepTraced))
    return (line for lines in of for line, classes in lines if "ZeroRedundancyOptimizer" in classes)


instead(
    __name__,
    "ddp_of_pytorch",
    "DistributedDataParallel",
    lambda run: (each.where for each in run.all(Wrapped)),
    Wrapped,
)
instead(__name__, "zero_of_pytorch", "ZeroRedundancyOptimizer", _zero, StepTraced)
instead(
    __name__, "fsdp_of_pytorch", "fully_shard", lambda run: (each.where for each in run.all(FullySharded)), FullySharded
)

# ---------------------------------------------------------------- exercise 1: data parallelism


@of_step(
    why="After the backward pass nothing is left to compute, so the GPU is idle while the gradients are communicated.",
    fix="Start all_reduce with async_op=True in a hook of each parameter (register_post_accumulate_grad_hook), as soon "
    "as its bucket is complete, and wait at the end of the backward pass.",
)
def average_late(step: TracedStep) -> Seen | None:
    """Most gradients are sent when the backward pass is nearly over."""
    calls = step.calls()
    whole, early = size_of(calls), size_of(step.early(calls))
    if early < EARLY * whole:
        late = f"{mib(whole - early)} of {mib(whole)}"
        return Seen(
            f"{step.who} sends {late} only after the backward pass has reached the first layer", calls[-1].where
        )
    return None


@of_step(
    why="A rank that waits for each call does not compute while it communicates, so nothing overlaps.",
    fix="Pass async_op=True to all_reduce, keep what it returns, and call wait() at the end of the backward pass.",
    after=(average_late,),
)
def average_waits(step: TracedStep) -> Seen | None:
    """No call is under way when a block begins its backward pass."""
    calls = step.early(step.calls())
    if calls and not any(map(step.under_way, step.places("backward"))):
        waits = [each for each in step.traced.moments if each.what == "wait" and each.phase == "backward"]
        count = plural(len(calls), "call")
        seen = f"in the backward pass, {step.who} waits for each of {count} before it computes the next layer"
        return Seen(seen, (waits or calls)[0].where)
    return None


@of_step(
    why="Each call has a fixed cost, so many small ones are slower than a few large ones with the same bytes.",
    fix="Join gradients into one tensor (torch.cat) until it has bucket_bytes, and send it with one all_reduce.",
)
def many_calls(step: TracedStep) -> Seen | None:
    """There is nearly one call for each parameter."""
    calls = step.calls()
    if len(calls) > MOST_CALLS:
        mean = size_of(calls) / len(calls) / 1024
        return Seen(f"{step.who} makes {len(calls)} calls in a step, of {mean:.1f} KiB each", calls[0].where)
    return None


@of_step(
    why="With many GPUs the network limits the speed, so sending a byte twice makes each step slower.",
    fix="Send each gradient once, with all_reduce, and nothing else: do not average again after the backward pass, and "
    "do not send the parameters.",
)
def sends_twice(step: TracedStep) -> Seen | None:
    """More is sent than the gradients."""
    calls, needed = step.calls(), 2 * (step.ranks - 1) / step.ranks * step.whole
    if size_of(calls) > TWICE * needed > 0:
        seen = f"{step.who} sends {mib(size_of(calls))} in a step; averaging all gradients once takes {mib(needed)}"
        return Seen(seen, calls[-1].where)
    return None


# ---------------------------------------------------------------- exercise 2: a sharded optimizer


@of_step(
    why="If each rank stores the whole optimizer state, more GPUs do not reduce the memory per GPU.",
    fix="Give the inner optimizer of each rank only the parameters that this rank updates.",
)
def state_whole(step: TracedStep) -> Seen | None:
    """The ranks together store more than the state of one process."""
    whole = MOMENTS * step.whole
    if sum(step.states) > TWICE * whole > 0:
        own, share = mib(step.traced.state), mib(whole / step.ranks)
        return Seen(f"{step.who} stores {own} of optimizer state; its share is {share}", step.optimizer)
    return None


def one_rank_has_most(step: TracedStep) -> Seen | None:
    """A rank stores more of the state than its share."""
    whole, own = MOMENTS * step.whole, step.traced.state
    if step.ranks > 1 and own > (1 / step.ranks + MORE) * whole > 0:
        share = mib(whole / step.ranks)
        return Seen(f"{step.who} stores {mib(own)} of optimizer state; an equal share is {share}", step.optimizer)
    return None


_also_of_step = state_uneven.also((WHOLE, BUILT_ALONE), needs=(StepTraced,), after=(state_whole,), active=True)
_also_of_step(judging(one_rank_has_most))


@of_step(
    why="Each call has a fixed cost, and the ranks wait for each other in each of them.",
    fix="Join the parameters that a rank has updated into one tensor, and send it with one broadcast (async_op=True).",
)
def many_messages(step: TracedStep) -> Seen | None:
    """The updated parameters are sent in many calls, or more than once."""
    calls = step.calls("optimizer", "")
    if len(calls) > MANY * step.ranks:
        return Seen(f"{step.who} sends the updated parameters in {plural(len(calls), 'call')}", calls[0].where)
    if size_of(calls) > TWICE * step.whole > 0:
        seen = f"{step.who} sends {mib(size_of(calls))} after the step; all parameters take {mib(step.whole)}"
        return Seen(seen, calls[-1].where)
    return None


# ---------------------------------------------------------------- exercise 3: sharded parameters


@of_step(
    why="If each rank stores all parameters between the steps, more GPUs do not reduce the memory per GPU.",
    fix="Store only the shard of this rank, as a copy (clone()), because a view keeps the memory of the whole tensor in "
    "use. Free the gathered parameters and the original ones.",
)
def held_whole(step: TracedStep) -> Seen | None:
    """A rank holds more than its share between the steps."""
    share = step.held_alone / step.ranks
    if step.ranks > 1 and step.traced.held > share + MORE * step.held_alone > 0:
        own, all_of_it = mib(step.traced.held), mib(step.held_alone)
        return Seen(f"{step.who} stores {own} between two steps; one process alone stores {all_of_it}", step.optimizer)
    return None


@of_step(
    why="If all layers are gathered together, each rank has the whole model in its memory, as with DDP.",
    fix="Make a unit of each layer, with parts_of(module, layers), and gather each unit when its forward pass begins.",
)
def layers_together(step: TracedStep) -> Seen | None:
    """The forward pass gathers fewer times than there are layers, or it begins with all layers in memory."""
    calls, layers = step.gathers("forward", ""), len(step.places("forward"))
    if len(calls) < layers:
        where = calls[0].where if calls else step.optimizer
        return Seen(f"{step.who} gathers the parameters of {layers} layers in {plural(len(calls), 'call')}", where)
    if begin := step.holds_most("forward", KEPT):
        return Seen(f"when the first layer begins its forward pass, {needs_more(step, begin)}", calls[-1].where)
    return None


@of_step(
    why="Each call has a fixed cost, so many small ones are slower than a few large ones with the same bytes.",
    fix="Join the shards of a unit into one tensor (torch.cat), and gather it with one all_gather_into_tensor.",
)
def many_gathers(step: TracedStep) -> Seen | None:
    """There is nearly one call for each parameter."""
    calls, units = step.gathers(), len(step.places("forward")) + 1
    if len(calls) > 2 * (units + 1) * step.ranks:  # two passes; each rank may send its shards in a call of its own
        seen = f"{step.who} gathers {units} units in {len(calls)} calls; one per unit and pass is enough"
        return Seen(seen, calls[0].where)
    return None


@of_step(
    why="If layers stay in full until the backward pass, each rank has the whole model in its memory.",
    fix="Free a layer after its forward pass, and gather it again in the backward pass. Use saved_tensors_hooks, so that "
    "autograd does not keep it either.",
    after=(layers_together,),
)
def layers_kept(step: TracedStep) -> Seen | None:
    """The backward pass gathers nothing, or its start finds the whole model in memory."""
    calls, layers = step.gathers("backward"), len(step.places("forward"))
    if len(calls) < layers - 1:  # the last layer may stay, because the backward pass begins with it
        seen = f"the backward pass of {layers} layers gathers {plural(len(calls), 'time')}: {step.who} keeps the layers in full"
        return Seen(seen, step.gathers()[-1].where)
    if begin := step.holds_most("backward", KEPT):
        return Seen(f"when the last layer begins its backward pass, {needs_more(step, begin)}", calls[0].where)
    return None


@of_step(
    why="A rank that gathers a layer only when it needs it waits for the network in each layer.",
    fix="When a layer begins, start to gather the next one with async_op=True (in the backward pass, the previous one), "
    "and call wait() when that layer begins.",
    after=(layers_together, layers_kept),
)
def not_prefetched(step: TracedStep) -> Seen | None:
    """No layer is being gathered while a different one is computed."""
    # When the last layer begins, nothing is left to gather. A backward pass may be noted before or after its own gather.
    for what, places in (("forward", step.places("forward")[:-1]), ("backward", step.places("backward")[1:-1])):
        for place in places:
            if not step.under_way(place, GATHERS):
                number = int(step.traced.moments[place].name) + 1
                seen = f"in the {what} pass, {step.who} gathers no other layer while it computes layer {number}"
                return Seen(seen, step.gathers()[-1].where)
    return None


@of_step(
    why="A rank needs the sums of gradients only for its own shards; an all-reduce sends it the sums of all gradients too.",
    fix="Use torch.distributed.reduce_scatter_tensor, once for each unit: each rank gets the sums for its own shards only.",
)
def reduces_whole(step: TracedStep) -> Seen | None:
    """A rank gets more sums than those of its shards, or gets them in many calls."""
    calls, needed = step.sums(), (step.ranks - 1) / step.ranks * step.whole
    if size_of(calls) > TWICE * needed > 0:
        sent = mib(size_of(calls))
        seen = f"{step.who} sends {sent} to sum gradients; the sums for the shards take {mib(needed)}"
        return Seen(seen, calls[0].where)
    if len(calls) > 2 * len(step.places("forward")) + 2:
        return Seen(f"{step.who} sums gradients in {len(calls)} calls; one for each unit is enough", calls[0].where)
    return None


@of_step(
    why="Gradients that stay in full until the end of the backward pass need as much memory as the whole model.",
    fix="Sum the gradients of a unit as soon as its backward pass is over, for example in backward() of the "
    "torch.autograd.Function that has gathered it.",
    after=(layers_together, reduces_whole),
)
def reduces_late(step: TracedStep) -> Seen | None:
    """Most gradients are summed when the backward pass is nearly over."""
    calls = step.sums()
    whole, early = size_of(calls), size_of(step.early(calls))
    if early < EARLY * whole:
        late = f"{mib(whole - early)} of {mib(whole)}"
        return Seen(f"{step.who} sums {late} only after the backward pass has reached the first layer", calls[-1].where)
    return None
