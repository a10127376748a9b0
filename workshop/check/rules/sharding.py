"""Models that are sharded over the ranks: groups, precision, the parameters to begin with, and clipping."""

import math
from collections.abc import Sequence

from workshop.check.evidence.events import (
    Collective,
    DeviceSeen,
    Evaluated,
    FineTuningBegun,
    FineTuningReported,
    FullySharded,
    InnerCollective,
    LayersSeen,
    LayoutSeen,
    StepBegun,
    WeightsRead,
    Wrapped,
)
from workshop.check.evidence.run import Process, Run
from workshop.check.rules.ending import ending
from workshop.check.rules.gradients import differs_from_one_process
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.speed import precision
from workshop.check.rules.words import listed, plural
from workshop.check.scenarios import ONE_PROCESS_TEXT, WHOLE

CLOSE = 0.02  # nats: how far bfloat16's rounding may move a loss
FIRST_STEPS = 4  # in which rounding has not yet grown


# ---------------------------------------------------------------- what each rank holds


@rule(
    why="A model that every rank holds in full needs the same memory on each GPU, however many GPUs you add.",
    fix="Call fully_shard on each layer and then on the model, with a mesh of all ranks and no other dimension.",
    runs=WHOLE,
    needs=(FullySharded, Wrapped, LayoutSeen),
    blocks=True,
)
def not_sharded(run: Run) -> Said:
    """The ranks hold all parameters, or most of them."""
    layout = _layout(run)
    if not any(run.all(FullySharded)):
        wrapped = next(run.all(Wrapped), None)
        size = f": {layout.whole / 1e6:.2f} MB of parameters on every rank" if layout else ""
        yield Seen(f"each rank holds the whole model{size}", wrapped.where if wrapped else "")
    elif layout and run.nproc > 1 and layout.own > layout.whole * (0.5 / run.nproc + 0.5):
        names = [name for name in layout.whole_here if not name.endswith("norm.weight")]
        which = f" ({listed(names)} among them)" if 0 < len(names) < 20 else ""
        share = layout.own / layout.whole
        yield Seen(f"each of {run.nproc} ranks holds {share:.0%} of the parameters{which}", _where(run))


@rule(
    why="Only a layer that is a group of its own is gathered by itself and freed before the next layer is gathered. "
    "With one group for all layers each rank holds the whole model during a step.",
    fix="Call fully_shard(layer) for every layer in model.model.layers, and then fully_shard(model).",
    runs=WHOLE,
    needs=(FullySharded, LayoutSeen),
    after=(not_sharded,),
)
def one_group(run: Run) -> Said:
    """Not each layer is a group."""
    layout = _layout(run)
    if layout and any(run.all(FullySharded)) and layout.layer_groups < layout.layers:
        seen = f"{plural(layout.groups, 'group')} for {plural(layout.layers, 'layer')}"
        yield Seen(seen + (": all parameters are gathered at once" if layout.groups == 1 else ""), _where(run))


@rule(
    why="A model that does not fit on one device cannot be loaded there in full before it is sharded.",
    fix="Create the model under torch.device('meta'), shard it, call to_empty(), and read only this rank's rows of each "
    "parameter with safetensors' safe_open and get_slice.",
    runs=WHOLE,
    needs=(FullySharded, WeightsRead),
)
def whole_model(run: Run) -> Said:
    """A rank holds, or reads, the whole model before it keeps its shard."""
    held = max((event.held for event in run.all(FullySharded)), default=0)
    read = next(run.all(WeightsRead), None)
    if held:
        yield Seen(f"before it is sharded, each rank holds {held / 1e6:.2f} MB of the model", _where(run))
    elif read and any(run.all(FullySharded)):
        seen = f"each rank reads all {read.bytes / 1e6:.2f} MB of the parameters to keep its shard"
        yield Seen(seen, read.where)


def _layout(run: Run) -> LayoutSeen | None:
    """How the model was sharded at the first step, on rank 0."""
    return run.trained[0].first(LayoutSeen) if run.trained else None


def _where(run: Run) -> str:
    """The first line that called fully_shard."""
    event = next(run.all(FullySharded), None)
    return event.where if event else ""


# ---------------------------------------------------------------- precision


@rule(
    why="AdamW changes a parameter by a thousandth of its value or less, and bfloat16 cannot represent steps that small: "
    "most updates round to zero.",
    fix="Create the model in float32, and let MixedPrecisionPolicy(param_dtype=torch.bfloat16) choose what it computes in.",
    runs=WHOLE,
    needs=(LayoutSeen, FullySharded, DeviceSeen),
    after=(not_sharded,),
)
def master_rounded(run: Run) -> Said:
    """The parameters that the optimizer changes are not float32."""
    layout = _layout(run)
    if layout and _bf16_is_fast(run) and layout.dtypes != ["torch.float32"]:
        kinds = ", ".join(name.removeprefix("torch.") for name in layout.dtypes)
        yield Seen(f"the parameters that the optimizer changes are {kinds}", _where(run))


@rule(
    why="Parameters in float32 take twice the bytes to communicate, before the forward and the backward of every layer.",
    fix="Set param_dtype=torch.bfloat16 in the MixedPrecisionPolicy, and remove torch.autocast: FSDP then converts each "
    "rank's shard before it gathers.",
    runs=WHOLE,
    needs=(Collective, InnerCollective, StepBegun, Evaluated, FineTuningBegun, LayersSeen, DeviceSeen, FullySharded),
    after=(not_sharded, precision, master_rounded),
)
def gathers_float32(run: Run) -> Said:
    """The layers compute in bfloat16, and the parameters are gathered in float32."""
    for process in run.trained[:1]:
        dtypes = {event.dtype for event in first_step(process, "all_gather")}
        if _bf16_is_fast(run) and "torch.float32" in dtypes and "torch.bfloat16" not in dtypes:
            seen = "the parameters are gathered in float32, but the layers compute in bfloat16"
            yield Seen(seen, _where(run))


@rule(
    why="Summing gradients of many ranks in bfloat16 loses the small ones.",
    fix="Set reduce_dtype=torch.float32 in the MixedPrecisionPolicy (before torch 2.15 the default is param_dtype).",
    runs=WHOLE,
    needs=(Collective, InnerCollective, StepBegun, Evaluated, FineTuningBegun, DeviceSeen, FullySharded),
    after=(not_sharded,),
)
def reduce_rounded(run: Run) -> Said:
    """The gradients are reduced in bfloat16."""
    for process in run.trained[:1]:
        dtypes = {event.dtype for event in first_step(process, "reduce_scatter")}
        if _bf16_is_fast(run) and "torch.bfloat16" in dtypes:
            yield Seen("the gradients of all ranks are summed in bfloat16", _where(run))


def first_step(process: Process, name: str) -> list[Collective | InnerCollective]:
    """The collectives whose name begins so, in the first training step."""
    found: list[Collective | InnerCollective] = []
    for _, event in process.events:
        if isinstance(event, StepBegun):
            break
        if isinstance(event, (Evaluated, FineTuningBegun)):
            found = []
        elif isinstance(event, (Collective, InnerCollective)) and event.name.startswith(name):
            found.append(event)
    return found


def _bf16_is_fast(run: Run) -> bool:
    return any(event.bf16_is_fast for event in run.all(DeviceSeen))


# ---------------------------------------------------------------- the first parameters


@rule(
    why="to_empty() leaves buffers uninitialized, and no checkpoint contains those of the rotary embedding. "
    "The model then cannot tell the positions of the tokens apart.",
    fix="Create the rotary embedding again after to_empty(), with the model's configuration, and move it to the device.",
    runs=WHOLE,
    needs=(LayoutSeen,),
    after=(not_sharded,),
)
def buffers_empty(run: Run) -> Said:
    """A rotary buffer has wrong contents."""
    layout = _layout(run)
    if layout and layout.buffers:
        seen = f"the contents of {listed(layout.buffers)} are not the frequencies of the positions"
        yield Seen(seen, layout.where)


@rule(
    why="The training starts from a different model than the checkpoint, and no error says so.",
    fix="After to_empty(), copy this rank's rows of every parameter from the checkpoint into parameter.to_local().",
    runs=WHOLE,
    needs=(FineTuningBegun,),
    after=(not_sharded, buffers_empty),
)
def weights_not_loaded(run: Run) -> Said:
    """Before the first step the model does not have the loss of the checkpoint."""
    expected = run.asked.validation_loss if run.asked else None
    if expected is None:
        return
    for event in run.all(FineTuningBegun):
        if not abs(event.validation_loss - expected) < CLOSE:  # NaN too
            yield Seen(
                f"before the first step the validation loss is {event.validation_loss:.4f}; "
                f"transformers alone has {expected:.4f} with this checkpoint",
                event.where,
            )
            return


# ---------------------------------------------------------------- clipping


@rule(
    why="Each rank scales its shard by a different factor, so the gradient changes its direction and its norm exceeds the limit.",
    fix="Call torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0): with DTensors it computes the norm over all ranks.",
    runs=WHOLE,
    needs=(StepBegun,),
    after=(not_sharded,),
)
def clip_local(run: Run) -> Said:
    """Each rank has clipped its own shard."""
    number, parts, where = _unclipped(run)
    if number and _each_clipped(parts):
        yield Seen(f"{_norms(number, parts)}: each rank has clipped its own shard", where)


@rule(
    why="One bad batch can change the parameters so much that the training does not recover.",
    fix="Call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0) after backward() and before the step.",
    runs=WHOLE,
    needs=(StepBegun,),
    after=(not_sharded,),
)
def clip_missing(run: Run) -> Said:
    """The gradients are not clipped."""
    number, parts, where = _unclipped(run)
    if number and not _each_clipped(parts):
        yield Seen(f"{_norms(number, parts)}: it is not clipped to 1", where)


def _unclipped(run: Run) -> tuple[int, list[float], str]:
    """The first step whose gradient has a norm above 1: its number (0: there is none), the norm on each rank, its line."""
    for number, steps in enumerate(zip(*(process.steps for process in run.trained), strict=False), 1):
        norms = [math.hypot(*(sketch[0] for sketch in step.before.gradients if sketch)) for step in steps]
        if math.hypot(*norms) > 1.01:
            return number, norms, steps[0].before.where
    return 0, [], ""


def _each_clipped(parts: Sequence[float]) -> bool:
    return len(parts) > 1 and max(parts) < 1.01


def _norms(number: int, parts: Sequence[float]) -> str:
    each = " and ".join(f"{part:.2f}" for part in parts)
    return f"in step {number} the norm of the gradient is {math.hypot(*parts):.2f} ({each} on the ranks)"


# ---------------------------------------------------------------- compared with one process


@differs_from_one_process.also(
    (WHOLE, ONE_PROCESS_TEXT), needs=(FineTuningReported,), after=(not_sharded,), last=True, active=True
)
def losses_differ_from_one_process(run: Run, single: Run) -> Said:
    """The losses of the first steps are not those of one process with the same global batches."""
    if ended := ending(single):
        yield Seen(f"with one process: {ended.text}", ended.where, ended.detail)
        return
    together, alone = losses(run)[:FIRST_STEPS], losses(single)
    bad = unequal(together, alone)
    if bad is not None:
        ranks = plural(run.nproc, "process")
        yield Seen(f"the loss of step {bad + 1} is {together[bad]:.4f} with {ranks} and {alone[bad]:.4f} with one")


def losses(run: Run) -> list[float]:
    """The losses of the steps, as rank 0 has reported them."""
    return [loss for process in run.ranks[:1] for event in process.of(FineTuningReported) for loss in event.losses]


def unequal(one: Sequence[float], other: Sequence[float]) -> int | None:
    """The index of the first pair of losses that differ by more than rounding, or None."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if not abs(a - b) < CLOSE), None)
