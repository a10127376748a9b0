"""Models that are sharded over the ranks: groups, precision, the initial parameters, and clipping."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from workshop.check.evidence.events import (
    Backward,
    Collective,
    DeviceSeen,
    Evaluated,
    FineTuningBegun,
    FineTuningReported,
    FullySharded,
    GradientsClipped,
    InnerCollective,
    LayoutSeen,
    Reported,
    StepBegun,
    WeightsRead,
    Wrapped,
)
from workshop.check.evidence.misuses import NormsSeen, ShardedAsOne, ShardsLeft
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import ending
from workshop.check.rules.gradients import clipping_differs, differs_from_one_process, gradients_differ, weights_differ
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, Told, findings, rule
from workshop.check.rules.speed import bf16_is_fast, precision
from workshop.check.rules.words import listed, plural
from workshop.check.scenarios import ONE_PROCESS_TEXT, WHOLE

CLOSE = 0.02  # nats: how much rounding in bfloat16 may change a loss
UNEQUAL = 1e-3  # relative difference of the factors of two ranks
TWICE = 2  # steps in which a variable must be such a norm
FIRST_STEPS = 4  # steps in which rounding errors are still small


@rule(
    why="A model that every rank holds in full needs the same memory on each GPU, however many GPUs you add.",
    fix="Call fully_shard on each layer and then on the model, with a one-dimensional mesh of all ranks.",
    needs=(FullySharded, LayoutSeen),
    blocks=True,
)
def not_sharded(run: Run) -> Said:
    """The ranks hold all parameters, or most of them."""
    layout = next(run.all(LayoutSeen), None)
    if not any(run.all(FullySharded)):
        size = f": {layout.whole / 1e6:.2f} MB of parameters on every rank" if layout else ""
        yield Seen(f"each rank holds the whole model{size}", run.where(Wrapped))
    elif layout and run.nproc > 1 and layout.own > layout.whole * (0.5 / run.nproc + 0.5):
        names = listed([name for name in layout.whole_here if not name.endswith("norm.weight")])
        share = f"{layout.own / layout.whole:.0%} of the parameters" + (f" ({names} among them)" if names else "")
        yield Seen(f"each of {run.nproc} ranks holds {share}", run.where(FullySharded), origin="call:init_device_mesh")


_of_shards = partial(rule, needs=(DeviceSeen, FineTuningBegun, FullySharded, LayoutSeen), after=(not_sharded,))


@_of_shards(
    why="FSDP gathers one group at a time, so with a single group each rank holds the whole model during the step.",
    fix="Call fully_shard(layer) for every layer in model.model.layers, and then fully_shard(model).",
)
def one_group(run: Run) -> Said:
    """Some layers are not groups of their own."""
    layout = next(run.all(LayoutSeen), None)
    if layout and layout.layer_groups < layout.layers:
        yield Seen(f"{plural(layout.groups, 'group')} for {plural(layout.layers, 'layer')}", run.where(FullySharded))


@_of_shards(
    why="Layers that stay gathered fill the memory: at the end of the forward pass each rank holds the whole model.",
    fix="Leave reshard_after_forward of fully_shard at its default for the layers: each is then gathered again for its backward.",
    after=(not_sharded, one_group),
)
def never_freed(run: Run) -> Said:
    """No layer is gathered again for the backward pass."""
    layout = next(run.all(LayoutSeen), None)
    inner = {type(event) for _, event in run.trained[0].events} if layout and run.nproc > 1 else set()
    if layout and layout.layer_groups > 1 and InnerCollective in inner and not first_step(run, "all_gather"):
        layers = plural(layout.layer_groups, "layer")
        seen = f"none of {layers} is gathered for the backward pass, so all are kept from the forward pass on"
        yield Seen(seen, run.where(FullySharded), origin="call:fully_shard")


@rule(
    why="A model that does not fit on one device cannot be loaded there in full before it is sharded.",
    fix="Create it under torch.device('meta'), shard it, call to_empty(), and read only the rows of this rank (get_slice()).",
    needs=(FullySharded, WeightsRead),
)
def whole_model(run: Run) -> Said:
    """A rank holds, or reads, the whole model before it keeps its shard."""
    held = max((event.held for event in run.all(FullySharded)), default=0)
    read = next(run.all(WeightsRead), None)
    if held:
        yield Seen(
            f"before it is sharded, each rank holds {held / 1e6:.2f} MB of the model",
            run.where(FullySharded),
            origin="call:.Model.*from_",
        )
    elif read and any(run.all(FullySharded)):
        yield Seen(f"each rank reads all {read.bytes / 1e6:.2f} MB of the parameters to keep its shard", read.where)


@_of_shards(
    why="AdamW changes a parameter by a thousandth of its value or less. In bfloat16 most of these updates round to zero.",
    fix="Create the model in float32, and compute in bfloat16: MixedPrecisionPolicy(param_dtype=torch.bfloat16).",
    origin="call:.Model.*from_",
)
def master_rounded(run: Run) -> Said:
    """The parameters that the optimizer updates are not float32."""
    layout = next(run.all(LayoutSeen), None)
    if layout and bf16_is_fast(run) and layout.dtypes != ["torch.float32"]:
        yield Seen(f"the optimizer updates parameters in {', '.join(layout.dtypes)}", run.where(FullySharded))


@_of_shards(
    why="Gathering parameters in float32 communicates twice the bytes, before the forward and the backward of every layer.",
    fix="Set param_dtype=torch.bfloat16 in the MixedPrecisionPolicy, so FSDP converts before it gathers; remove torch.autocast.",
    after=(not_sharded, precision, master_rounded),
    origin="call:MixedPrecisionPolicy",
)
def gathers_float32(run: Run) -> Said:
    """The layers compute in bfloat16, and the parameters are gathered in float32."""
    dtypes = first_step(run, "all_gather")
    if bf16_is_fast(run) and "torch.float32" in dtypes and "torch.bfloat16" not in dtypes:
        yield Seen("the layers compute in bfloat16, but gather their parameters in float32", run.where(FullySharded))


@_of_shards(
    why="Summing gradients of many ranks in bfloat16 loses the small ones.",
    fix="Set reduce_dtype=torch.float32 in the MixedPrecisionPolicy (before torch 2.15 the default is param_dtype).",
    origin="call:MixedPrecisionPolicy",
)
def reduce_rounded(run: Run) -> Said:
    """The gradients are reduced in bfloat16."""
    if bf16_is_fast(run) and "torch.bfloat16" in first_step(run, "reduce_scatter"):
        yield Seen("the gradients of all ranks are summed in bfloat16", run.where(FullySharded))


def first_step(run: Run, name: str) -> list[str]:
    """Return the dtypes of the collectives whose name begins with ``name``, in the first training step of rank 0."""
    found: list[str] = []
    for _, event in run.trained[0].events if run.trained else ():
        if isinstance(event, StepBegun):
            break
        if isinstance(event, Evaluated | FineTuningBegun):
            found = []
        elif isinstance(event, Collective | InnerCollective) and event.name.startswith(name):
            found.append(event.dtype)
    return found


@_of_shards(
    why="to_empty() leaves the rotary buffers uninitialized and no checkpoint has them, so the model confuses positions.",
    fix="Create the rotary embedding again after to_empty(), with the model's configuration, and move it to the device.",
    origin="call:to_empty",
)
def buffers_empty(run: Run) -> Said:
    """A rotary buffer has wrong contents."""
    layout = next(run.all(LayoutSeen), None)
    if layout and layout.buffers:
        yield Seen(f"{listed(layout.buffers)}: the contents are not the frequencies of the positions", layout.where)


@_of_shards(
    why="The training starts from a different model than that of the checkpoint, without an error message.",
    fix="After to_empty(), copy the rows of this rank of every parameter from the checkpoint into parameter.to_local().",
    after=(not_sharded, buffers_empty),
    origin="call:.copy_$",
)
def weights_not_loaded(run: Run) -> Said:
    """Before the first step the model does not have the loss of the checkpoint."""
    expected = run.asked.validation_loss if run.asked else None
    for event in run.all(FineTuningBegun):
        if expected is not None and not abs(event.validation_loss - expected) < CLOSE:  # NaN too
            seen = f"before the first step the validation loss is {event.validation_loss:.4f}"
            yield Seen(f"{seen}; transformers gets {expected:.4f} with this checkpoint", event.where)
            return


@_of_shards(
    why="Each rank scales its shard by a different factor: the gradient changes direction, and its norm exceeds the limit.",
    fix="Call torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0): with DTensors it computes the norm over all ranks.",
    origin="call:clip_grad_norm_",
)
def clip_local(run: Run) -> Said:
    """Each rank has clipped its own shard."""
    return findings(clip_local, _unclipped, run)


@_of_shards(
    why="One bad batch can change the parameters so much that the training does not recover.",
    fix="Call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0) after backward() and before the step.",
)
def clip_missing(run: Run) -> Said:
    """The gradients are not clipped."""
    return findings(clip_missing, _unclipped, run)


def _unclipped(run: Run) -> Told:
    """The first step whose gradient has a norm above 1, with the rule that it breaks."""
    for number, steps in enumerate(zip(*(process.steps for process in run.trained), strict=False), 1):
        norms = [math.hypot(*(sketch[0] for sketch in step.before.gradients if sketch)) for step in steps]
        each = " and ".join(f"{norm:.2f}" for norm in norms)
        seen = f"in step {number} the norm of the gradient is {math.hypot(*norms):.2f} ({each} on the ranks)"
        if len(norms) > 1 and math.hypot(*norms) > 1.01 > max(norms):
            return [(clip_local, Seen(f"{seen}: each rank has clipped its own shard", steps[0].before.where))]
        if math.hypot(*norms) > 1.01:
            return [(clip_missing, Seen(f"{seen}: it is not clipped to 1", steps[0].before.where))]
    return []


@differs_from_one_process.also((WHOLE, ONE_PROCESS_TEXT), needs=(FineTuningReported,), last=True, active=True)
def losses_differ_from_one_process(run: Run, single: Run) -> Said:
    """The losses of the first steps are not those of one process with the same global batches."""
    if ended := ending(single):
        yield Seen(f"with one process: {ended.text}", ended.where, ended.detail)
    elif seen := unequal(losses(run)[:FIRST_STEPS], losses(single)):
        yield Seen(f"{seen} with one process")


def losses(run: Run, kind: type[FineTuningReported | Reported] = FineTuningReported) -> list[float]:
    """The losses of the steps, as rank 0 has reported them."""
    return [loss for process in run.ranks[:1] for event in process.of(kind) for loss in event.losses]


def unequal(ours: Sequence[float], theirs: Sequence[float], close: float = CLOSE, first: int = 1) -> str:
    """Which losses differ by more than rounding, as "the loss of step 2 is ..., but ..."; ``first``: the first step."""
    for number, (our, their) in enumerate(zip(ours, theirs, strict=False), first):
        if not abs(our - their) < close:  # NaN too
            return f"the loss of step {number} is {our:.4f}, but {their:.4f}"
    return ""


@clipping_differs.also(WHOLE, needs=(ShardsLeft,), after=(no_group, wrong_group, gradients_differ, weights_differ))
def shards_scaled_differently(run: Run) -> Said:
    """Between backward and the step, each rank scales the gradients of its shards by a factor of its own."""
    if any(run.all(GradientsClipped)) or len(run.trained) < 2:
        return  # the norms say more
    for number, together in enumerate(zip(*(_scaled(process) for process in run.trained), strict=False), 1):
        factors = [factor for factor in together if factor]
        if len(factors) == len(together) and max(factors) - min(factors) > UNEQUAL * max(factors):
            shown = " and ".join(f"{factor:.3g}" for factor in factors[:4])
            where = next((step.before.where for step in run.trained[0].steps if step.before.sharded), "")
            local = "call:get_total_norm holds:to_local last:_foreach_mul_ last:mul_ last:div_ here"
            yield Seen(
                f"before step {number} the ranks multiply the gradients of their shards by {shown}", where, origin=local
            )
            return


def _scaled(process: Process) -> Iterator[float | None]:
    """By what the gradients of each of the first steps are multiplied after backward(); None: not all by the same number."""
    left: ShardsLeft | None = None
    for _, event in process.events:
        if isinstance(event, ShardsLeft):
            left = event
        elif isinstance(event, StepBegun) and left:
            pairs = zip(event.names, event.gradients, strict=True)
            factors = [sketch[0] / left.norms[name] for name, sketch in pairs if sketch and left.norms.get(name)]
            alike = factors and max(factors) - min(factors) < UNEQUAL / 10 * max(factors)
            left = None
            yield factors[0] if alike else None


@rule(
    why="The norm of the whole gradient is the root of the sum of the squares of all parts. With a different one, the gradients "
    "are clipped too early or too late, and the logged norm depends on the number of processes.",
    fix="With fully_shard, torch.nn.utils.clip_grad_norm_() computes the norm of all parts. By hand, sum the squares over the "
    "ranks that have the parts: dist.all_reduce(square), then square.sqrt().",
    needs=(NormsSeen,),
    after=(no_group, wrong_group, gradients_differ, weights_differ, clipping_differs),
    anywhere=True,
)
def norm_of_parts(run: Run) -> Said:
    """Ranks with different parts of the gradient know a norm that is not that of the whole: of one part, or the sum of all."""
    found: list[tuple[str, str, str]] = []  # what was seen, the variable, and the origin
    for together in zip(*(_norms(process) for process in run.trained), strict=False):
        parts = [step.norm for step in together]
        if len(parts) < 2 or min(parts) <= 0 or max(parts) - min(parts) <= UNEQUAL * max(parts):
            continue
        for name in together[0].seen:
            known = [step.seen.get(name, 0.0) for step in together]
            if all(map(_equal, known, parts)):
                shown = " and ".join(f"{norm:.4g}" for norm in known[:4])
                seen = f"`{name}` is the norm of the gradients of each rank's own part ({shown})"
                found.append((seen, name, f"made:{name}"))
            elif all(_equal(each, sum(parts)) for each in known):
                seen = f"`{name}` ({known[0]:.4g}) is the sum of the norms of the ranks' parts"
                seen += f", but the norm of the whole gradient is {math.hypot(*parts):.4g}"
                found.append((seen, name, f"last:all_reduce made:{name}"))
        where = together[0].where
    for seen, name, origin in found:
        if [each for _, each, _ in found].count(name) >= TWICE:
            yield Seen(seen, where, origin=origin)
            return


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=UNEQUAL / 10)


class _Normed(NamedTuple):
    """A step before which variables are norms."""

    norm: float  # of the gradients of this process
    seen: dict[str, float]  # the variables
    where: str


def _norms(process: Process) -> Iterator[_Normed]:
    """The first of these steps."""
    seen: dict[str, float] = {}
    for _, event in process.events:
        if isinstance(event, NormsSeen):
            seen = event.norms
        elif isinstance(event, StepBegun) and seen:
            yield _Normed(math.hypot(*(sketch[0] for sketch in event.gradients if sketch)), seen, event.where)
            seen = {}


@rule(
    why="FSDP frees the parameters of one group before it gathers the next one. With a single group each rank holds the whole "
    "model in every step, and no communication overlaps with computing.",
    fix="Call fully_shard(layer) for each layer, and then fully_shard(model); with FullyShardedDataParallel, pass an "
    "auto_wrap_policy for the class of the layers.",
    needs=(ShardedAsOne,),
    origin=r"text:\b(fully_shard|FullyShardedDataParallel|FSDP)\(",
    after=(no_group, wrong_group),
    anywhere=True,
)
def gathered_as_one(run: Run) -> Said:
    """FSDP has one group for a model with a list of equal layers."""
    for event in run.trained[0].of(ShardedAsOne)[:1] if run.trained else ():
        seen = f"FSDP gathers all parameters together, although the model has {event.layers} layers {event.kind}"
        yield Seen(seen, event.where)


@rule(
    why="fully_shard adds up the gradients of the batches, and reduces them to the shards only if it is asked to. The step uses "
    "what the shards have, without the batches after the last reduction.",
    fix="Turn the synchronization on for the last batch of each step: model.set_requires_gradient_sync(batch == accumulate - 1).",
    after=(no_group, wrong_group, gradients_differ, weights_differ),
    anywhere=True,
    origin="sync",
)
def last_batch_left_out(run: Run) -> Said:
    """The gradients of the last batches of a step are not reduced to the shards before the step."""
    for process in run.trained[:1]:
        left: list[
            tuple[int, int, str]
        ] = []  # of each such step: batches after the last reduction, all batches, the line
        passes: list[tuple[Backward, bool]] = []  # since the last step, and whether it reduces gradients
        for _, event in process.events:
            if isinstance(event, Backward):
                passes.append((event, False))
            elif isinstance(event, InnerCollective) and "reduce_scatter" in event.name and passes:
                passes[-1] = passes[-1][0], True
            elif isinstance(event, StepBegun):
                reduced = [number for number, (_, reduces) in enumerate(passes, 1) if reduces]
                if event.sharded and reduced and reduced[-1] < len(passes):
                    left.append((len(passes) - reduced[-1], len(passes), passes[-1][0].where))
                passes = []
        if left and 2 * len(left) > len(process.steps):
            count, of, where = left[0]
            yield Seen(
                f"the step uses the gradients of {of - count} of its {of} batches: the last ones are not reduced", where
            )
