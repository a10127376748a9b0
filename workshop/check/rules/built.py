"""Programs that build a parallelism by hand (stage 06): what they compute, send and hold."""

from collections.abc import Iterable

from workshop.check.evidence.events import BuildReported, CaseTried, FullySharded, Moment, StepTraced, Wrapped
from workshop.check.evidence.run import Process, Run
from workshop.check.rules.ending import ending
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.rules.words import named, plural
from workshop.check.scenarios import BUILT_ALONE, BUILT_CASES, WHOLE

CLOSE = 1e-9  # between losses in float64 after a few steps
MOST_CALLS = 20  # of the 52 parameters of the model
MANY = 8  # messages of an optimizer step
UNEVEN = 1.3  # the most that one rank may have, as a multiple of the mean
TWICE = 1.3  # the most that a rank may send, as a multiple of what is needed
MORE = 0.2  # of the whole: how much more than its share a rank may hold
KEPT = 0.9  # of the parameters: what a rank may hold at the start of the backward pass; it needs 0.5


def _traced(run: Run) -> list[tuple[Process, StepTraced]]:
    return [(process, event) for process in run.ranks for event in process.of(StepTraced)[:1]]


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


def _calls(traced: StepTraced, *phases: str, names: Iterable[str] = ()) -> list[Moment]:
    chosen = [each for each in traced.moments if each.what == "call" and (not names or each.name in names)]
    return [each for each in chosen if not phases or each.phase in phases]


# ---------------------------------------------------------------- equal to one process


@rule(
    why="A distributed training must compute what one process computes with the same global batches; otherwise it is another one.",
    fix="Compare the gradients of one step with those of one process: run both with --dtype float64 --steps 1, and print them.",
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


CASES = {
    "start": "a model that each rank has created with other random numbers",
    "odd": "a model with a tied, a frozen and an unused parameter, and one that only rank 0 uses",
    "no-gradient": "AdamW and a parameter without gradients",
    "twice": "two backward passes before the step",
    "changed": "a parameter that was replaced",
    "other-class": "a different class of optimizer",
    "shares": "parameters of different sizes",
    "scheduled": "a schedule of the learning rate",
    "saved": "state_dict()",
    "loaded": "load_state_dict()",
    "loaded-part": "load_state_dict()",
    "uneven-sizes": "parameters whose size the ranks do not divide",
    "precision": "compute_dtype",
    "old-parameters": "a forward pass without a backward pass",
}


def _case(run: Run, *names: str) -> Said:
    """What went wrong in these cases."""
    tried = [event for process in run.ranks[:1] for event in process.of(CaseTried)]
    for name in names:
        results = [event for event in tried if event.name == name]
        if not results:
            yield NotJudged(f"{CASES[name]}: an earlier case did not end", goal=True)
        elif results[-1].problem is None:
            what = "the ranks wait for each other" if run.hung else "the program ended"
            yield Seen(f"with {CASES[name]}, {what}")
        elif results[-1].problem:
            yield Seen(f"with {CASES[name]}: {results[-1].problem}")
            return


def _case_rule(name: str, why: str, fix: str, *cases: str) -> None:
    def judge(run: Run) -> Said:
        yield from _case(run, *cases)

    judge.__name__, judge.__doc__, judge.__module__ = name, f"The cases {', '.join(cases)}.", __name__
    rule(why=why, fix=fix, runs=BUILT_CASES, needs=(CaseTried,))(judge)


_case_rule(
    "start_unequal",
    "Ranks that begin with different parameters add up gradients of different models.",
    "In __init__, send each parameter and each buffer of the first rank with torch.distributed.broadcast.",
    "start",
)
_case_rule(
    "case_fails",
    "A class that works only for the model of the exercise is no use for your next one.",
    "Handle parameters that are tied, frozen, not used, or used by some ranks only: all ranks must make the same calls, and a "
    "gradient that no rank has must stay None. Several backward passes add up their gradients.",
    "odd", "no-gradient", "twice",
)  # fmt: skip
_case_rule(
    "change_unnoticed",
    "The gradient of a parameter that was replaced later is not averaged: the ranks then train different models, without an error.",
    "In forward(), compare the parameters with those that the class has wrapped, and raise a ValueError that names the changed one.",
    "changed",
)
_case_rule(
    "optimizer_case_fails",
    "A sharded optimizer must do what its class does in one process.",
    "Pass all options to the inner optimizer, and before each step also those that a schedule has changed in param_groups.",
    "other-class", "scheduled",
)  # fmt: skip
_case_rule(
    "state_uneven",
    "The rank with the largest part decides how much memory the training needs.",
    "Give each parameter, the largest first, to the rank with the fewest elements so far.",
    "shares",
)
_case_rule(
    "state_partial",
    "A checkpoint with the state of one rank cannot continue the training of the other parameters.",
    "In state_dict(), collect the states of all ranks with torch.distributed.all_gather_object; in load_state_dict(), keep those of "
    "the parameters of this rank.",
    "saved", "loaded", "loaded-part",
)  # fmt: skip
_case_rule(
    "shards_fail",
    "A class that works only for the model of the exercise is no use for your next one.",
    "Fill up the shards of all ranks to the same size, sum gradients in the type of the shards, gather again after each step, and "
    "make the same calls on all ranks, also for parameters that only some ranks have used.",
    "odd", "uneven-sizes", "precision", "old-parameters",
)  # fmt: skip


def _instead(name: str, kind: type[Wrapped] | type[FullySharded], what: str) -> None:
    def judge(run: Run) -> Said:
        for event in run.all(kind):
            yield Seen(f"the program uses {what} of PyTorch", event.where)
            return

    judge.__name__, judge.__doc__, judge.__module__ = name, "The program uses the class of PyTorch.", __name__
    why = "The exercise is to build it; PyTorch's own class is for comparison, with the option --pytorch."
    rule(why=why, fix="Use your own class unless --pytorch was given.", needs=(kind,))(judge)


_instead("ddp_of_pytorch", Wrapped, "DistributedDataParallel")
_instead("fsdp_of_pytorch", FullySharded, "fully_shard")

# ---------------------------------------------------------------- exercise 1: data parallelism

REDUCING = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


@rule(
    why="Gradients that are sent after the backward pass are sent while nothing is computed, so the step takes longer.",
    fix="Start all_reduce with async_op=True in a hook of each parameter (register_post_accumulate_grad_hook), and wait at the end "
    "of the backward pass.",
    needs=(StepTraced,),
)
def average_late(run: Run) -> Said:
    """Most gradients are sent after the backward pass."""
    for process, traced in _traced(run):
        calls = _calls(traced)
        late = [each for each in calls if each.phase != "backward"]
        whole, size = sum(each.bytes for each in calls), sum(each.bytes for each in late)
        if size > whole / 2:
            yield Seen(f"{named(process)} sends {_mib(size)} of {_mib(whole)} when the backward pass is over", late[0].where)
            return


@rule(
    why="A rank that waits for each call sends and computes in turn: nothing overlaps, although the calls are in the backward pass.",
    fix="Pass async_op=True to all_reduce, keep what it returns, and call wait() at the end of the backward pass.",
    needs=(StepTraced,),
    after=(average_late,),
)
def average_waits(run: Run) -> Said:
    """Each call in the backward pass is waited for at once."""
    for process, traced in _traced(run):
        moments = [each for each in traced.moments if each.phase == "backward"]
        pairs = [(each, after) for each, after in zip(moments, moments[1:], strict=False) if each.what == "call"]
        waited = [each for each, after in pairs if after.what == "wait"]
        if len(pairs) > 1 and len(waited) >= len(pairs) - 1:
            yield Seen(f"{named(process)} waits for each of its {len(pairs)} calls before it computes on", waited[0].where)
            return


@rule(
    why="Each call has a fixed cost, so many small ones are slower than a few large ones with the same bytes.",
    fix="Join gradients to one tensor (torch.cat) until it has bucket_bytes, and send it with one all_reduce.",
    needs=(StepTraced,),
)
def many_calls(run: Run) -> Said:
    """There is nearly one call for each parameter."""
    for process, traced in _traced(run):
        calls = _calls(traced)
        if len(calls) > MOST_CALLS:
            size = sum(each.bytes for each in calls) / len(calls)
            yield Seen(f"{named(process)} makes {len(calls)} calls in a step, of {size / 1024:.1f} KiB each", calls[0].where)
            return


@rule(
    why="The network is the slowest part of a large training, so a byte that is sent twice costs time in each step.",
    fix="Send each gradient once: leave out parameters that are not trained, and do not average again after the backward pass.",
    needs=(StepTraced,),
)
def sends_twice(run: Run) -> Said:
    """More is sent than the gradients."""
    for process, traced in _traced(run):
        size, calls = len(run.ranks), _calls(traced)
        needed, sent = 2 * (size - 1) / size * traced.parameters, sum(each.bytes for each in calls)
        if size > 1 and sent > TWICE * needed:
            yield Seen(f"{named(process)} sends {_mib(sent)} in a step; to average all gradients once takes {_mib(needed)}",
                       calls[-1].where)  # fmt: skip
            return


# ---------------------------------------------------------------- exercise 2: a sharded optimizer


@rule(
    why="Optimizer state that every rank stores in full needs the memory of one process, however many GPUs there are.",
    fix="Give the inner optimizer of each rank only the parameters that this rank updates.",
    needs=(StepTraced,),
)
def state_whole(run: Run) -> Said:
    """Each rank stores the state of all parameters."""
    for process, traced in _traced(run):
        size, whole = len(run.ranks), 2 * traced.parameters  # AdamW has two values for each element
        if size > 1 and traced.state > (1 / size + MORE) * whole:
            yield Seen(f"{named(process)} stores {_mib(traced.state)} of optimizer state; its share is {_mib(whole / size)}")
            return


@rule(
    why="Each call has a fixed cost, and the ranks wait for each other in each of them.",
    fix="Join the parameters that a rank has updated to one tensor, and send it with one broadcast (async_op=True).",
    needs=(StepTraced,),
)
def many_messages(run: Run) -> Said:
    """The updated parameters are sent in many calls, or more than once."""
    for process, traced in _traced(run):
        calls = _calls(traced, "optimizer", "")
        sent = sum(each.bytes for each in calls)
        if len(calls) > MANY:
            yield Seen(f"{named(process)} sends the updated parameters in {plural(len(calls), 'call')}", calls[0].where)
            return
        if sent > TWICE * traced.parameters:
            yield Seen(f"{named(process)} sends {_mib(sent)} after the step; the parameters have {_mib(traced.parameters)}",
                       calls[0].where)  # fmt: skip
            return


# ---------------------------------------------------------------- exercise 3: sharded parameters


@rule(
    why="Parameters that every rank stores in full between the steps need the memory of one process, however many GPUs there are.",
    fix="Keep only the shard of this rank as the parameter, and free what was gathered.",
    runs=(WHOLE, BUILT_ALONE),
    needs=(StepTraced,),
)
def held_whole(run: Run, alone: Run) -> Said:
    """Each rank holds more than its share between the steps."""
    whole = next((traced.held for _, traced in _traced(alone)), 0)
    for process, traced in _traced(run):
        size = len(run.ranks)
        if whole and traced.held > (1 / size + MORE) * whole:
            yield Seen(f"{named(process)} holds {_mib(traced.held)} between two steps; one process alone holds {_mib(whole)}")
            return


def _blocks(traced: StepTraced, what: str = "forward") -> list[int]:
    """The positions at which blocks begin."""
    return [place for place, each in enumerate(traced.moments) if each.what == what]


def _gathers(traced: StepTraced, *phases: str) -> list[Moment]:
    return _calls(traced, *phases, names=("all_gather", "broadcast"))


@rule(
    why="If all layers are gathered together, each rank has the whole model in memory at once, as with DDP.",
    fix="Make a unit of each layer, with parts_of(module, layers), and gather each unit when its forward pass begins.",
    needs=(StepTraced,),
)
def layers_together(run: Run) -> Said:
    """The forward pass gathers fewer times than there are layers."""
    for process, traced in _traced(run):
        calls, layers = _gathers(traced, "forward", ""), len(_blocks(traced))
        if len(calls) < layers:
            yield Seen(f"{named(process)} gathers the parameters of {layers} layers in {plural(len(calls), 'call')}",
                       calls[0].where if calls else "")  # fmt: skip
            return


@rule(
    why="Layers that stay in full until the backward pass add up to the whole model in the memory of each rank.",
    fix="Free a layer after its forward pass, and gather it again in the backward pass; autograd must not keep it either "
    "(saved_tensors_hooks).",
    runs=(WHOLE, BUILT_ALONE),
    needs=(StepTraced,),
    after=(layers_together,),
)
def layers_kept(run: Run, alone: Run) -> Said:
    """The backward pass gathers nothing, or its start finds the whole model in memory."""
    whole = next((traced.parameters for _, traced in _traced(alone)), 0)
    for process, traced in _traced(run):
        calls, layers = _gathers(traced, "backward"), len(_blocks(traced))
        if len(calls) < layers:
            yield Seen(f"{named(process)} gathers {plural(len(calls), 'time')} in the backward pass of {layers} layers: it keeps "
                       "the layers in full from the forward pass on")  # fmt: skip
            return
        start = next(each for each in traced.moments if each.what == "backward")
        if whole and start.held - traced.held > KEPT * whole:
            yield Seen(f"when the backward pass begins, {named(process)} holds {_mib(start.held - traced.held)} more than between "
                       f"two steps; all parameters have {_mib(whole)}", start.where)  # fmt: skip
            return


@rule(
    why="A rank that gathers a layer only when it needs it waits for the network in each layer.",
    fix="When a layer begins, start to gather the next one with async_op=True, in the backward pass the one before.",
    needs=(StepTraced,),
    after=(layers_together,),
)
def not_prefetched(run: Run) -> Said:
    """The next layer is not gathered while a layer computes."""
    for process, traced in _traced(run):
        gathers = _gathers(traced)
        size = max((each.bytes for each in gathers), key=[each.bytes for each in gathers].count, default=0)  # of a layer
        for what, ahead in (("forward", 2), ("backward", 1)):
            starts = _blocks(traced, what)
            begin = next((place for place, each in enumerate(traced.moments) if each.phase == "backward"), 0) if ahead == 1 else 0
            for number, place in list(enumerate(starts))[2 - ahead : len(starts) - ahead + 1]:
                found = [each for each in traced.moments[begin:place] if each in gathers and each.bytes == size]
                if len(found) < number + ahead:
                    yield Seen(f"in the {what} pass, {named(process)} begins to gather layer {number + ahead} only after the one "
                               "before was computed", gathers[-1].where)  # fmt: skip
                    return


@rule(
    why="An all-reduce gives every rank the sums of all gradients, twice as many bytes as the rank needs for its shards.",
    fix="Use torch.distributed.reduce_scatter_tensor: each rank gets the sums for its own shards only.",
    runs=(WHOLE, BUILT_ALONE),
    needs=(StepTraced,),
)
def reduces_whole(run: Run, alone: Run) -> Said:
    """Gradients are summed with all_reduce."""
    whole = next((traced.parameters for _, traced in _traced(alone)), 0)
    for process, traced in _traced(run):
        calls = _calls(traced, "backward", names=("all_reduce",))
        if sum(each.bytes for each in calls) > MORE * whole > 0:
            yield Seen(f"{named(process)} sends {_mib(sum(each.bytes for each in calls))} by all_reduce in the backward pass",
                       calls[0].where)  # fmt: skip
            return
        sums = _calls(traced, "backward", names=("reduce_scatter",))
        if len(sums) > 2 * len(_blocks(traced)) + 2:
            yield Seen(f"{named(process)} sums gradients in {len(sums)} calls; one for each unit is enough", sums[0].where)
            return


