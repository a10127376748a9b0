"""Models that several ranks have together: pipelines, and layers that are divided among ranks."""

from itertools import combinations

from workshop.check.evidence.events import (
    CheckpointCalled,
    Collective,
    InputSharded,
    ModelDivided,
    Saved,
    Sketch,
    Wrapped,
)
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import named, plural


@rule(
    why="Each rank computes a part of the same layer, and the parts are added up. The sum is wrong if they come from different "
    "batches.",
    fix="Give all ranks of a group of tensor parallelism the same batch: pass num_replicas and rank of data parallelism to "
    "DistributedSampler, not those of all processes, and use the same seed on these ranks.",
    after=(no_group, wrong_group),
    anywhere=True,
    origin="loader",
)
def batches_of_a_layer_differ(run: Run) -> Said:
    """Ranks that have parts of the same layers see different samples."""
    if run.divided != "layers" or run.failed or any(run.all(InputSharded)):  # each rank has a part of the same batch
        return
    # Beside a wrapped model, only some layers are divided, such as those of classes, and they get the samples of all ranks.
    if any(run.all(Wrapped)) and not any(run.all(ModelDivided)):
        return
    for one, two in combinations(run.trained, 2):
        steps = list(zip(one.steps, two.steps, strict=False)) if two.rank in run.parts_of(one) else []
        known = [(here, there) for here, there in steps if here.rows and there.rows]
        apart = [pair for pair in known if set(pair[0].rows).isdisjoint(pair[1].rows)]
        if len(known) > 1 and len(apart) > len(known) / 2:
            seen = f"{named(one)} and {named(two)} have parts of the same layers, but see different samples in {len(apart)} of "
            yield Seen(f"{seen}{plural(len(known), 'step')}", one.data_where)
            return


@rule(
    why="Each rank has different layers, or a different part of each layer. A checkpoint with the parameters of one rank "
    "loses the others.",
    fix="Save on every rank with torch.distributed.checkpoint, or one file per rank, or gather the state_dict() of all ranks "
    "before rank 0 saves them.",
    after=(no_group, wrong_group),
    anywhere=True,
)
def one_stage_saved(run: Run) -> Said:
    """Only one rank of a pipeline, or of divided layers, saves parameters, and only its own."""
    if run.divided not in ("stages", "layers") or run.failed or any(run.all(CheckpointCalled)):
        return
    saving = [(process, [each for each in process.of(Saved) if each.keys]) for process in run.trained]
    own = {id(process): len(process.steps[0].before.names) for process in run.trained}
    with_files = [(process, saves) for process, saves in saving if saves]
    if len(with_files) != 1 or _gathers(with_files[0][0]):
        return
    process, saves = with_files[0]
    most = max(len(each.keys) for each in saves)
    whole = sum(own.values())
    if run.divided == "layers" and most >= own[id(process)] and len(run.parts_of(process)) > 1:
        seen = f"only {named(process)} saves parameters, and it has only its own part of the layers"
        yield Seen(seen, saves[0].where)
    elif run.divided == "stages" and most < 0.8 * whole:
        seen = f"only {named(process)} saves parameters: {most} of the {whole} of all ranks"
        yield Seen(seen, saves[0].where)


@rule(
    why="The copies of a tied parameter, such as the table of the tokens in the first and in the last stage, are one parameter "
    "of the model. If each copy gets only its own part of the gradient, they become different.",
    fix="Make a group of these two ranks with dist.new_group(), and before each step sum the gradients of the copies: "
    "all_reduce(param.grad, group=tied).",
    after=(no_group, wrong_group),
    anywhere=True,
)
def tied_apart(run: Run) -> Said:
    """Two stages of a pipeline begin with the same parameter, which has different values on them later."""
    if run.divided != "stages" or run.failed:
        return
    for one, two in combinations(run.trained, 2):
        (first, second), last = (one.steps[0].before, two.steps[0].before), min(len(one.steps), len(two.steps)) - 1
        places = {each[0]: number for number, each in enumerate(second.weights) if each}  # by the norm
        found = [(number, places.get(each[0])) for number, each in enumerate(first.weights) if each and _is_drawn(each)]
        same = [
            (here, there)
            for here, there in found
            if there is not None and difference([first.weights[here]], [second.weights[there]]) == 0
        ]
        # Stages that were made with the same seed begin with the same values of all parameters.
        if last < 1 or not same or 2 * len(same) >= min(len(first.weights), len(second.weights)):
            continue
        now, then = one.steps[last].before.weights, two.steps[last].before.weights
        for here, there in same:
            if max(here, there) < min(len(now), len(then)) and difference([now[here]], [then[there]]) > CLOSE:
                names = f"`{first.names[here]}` of {named(one)} and `{second.names[there]}` of {named(two)}"
                seen = f"{names} begin with the same values, but differ after {plural(last, 'step')}"
                yield Seen(seen, one.step_where)
                return


def _is_drawn(values: Sketch) -> bool:
    """Whether a parameter begins with values that somebody has drawn, unlike the ones and zeros of a LayerNorm."""
    return values is not None and len({round(each, 6) for each in values[1]}) > 2


def _gathers(process: Process) -> bool:
    """Whether the rank receives objects or tensors of all ranks."""
    return any("gather" in event.name or event.name == "full_tensor" for event in process.of(Collective))
