"""Programs that combine several kinds of parallelism on a mesh (exercise 8 of stage 06)."""

from workshop.check.evidence.events import Moment
from workshop.check.rules.rule import Seen
from workshop.check.rules.traced import TracedStep, mib, of_step, size_of
from workshop.check.rules.tried import case_rule

MOST_CALLS = 12  # after the backward pass: enough for a few buckets and a norm
TWICE = 1.3  # the most that a rank may send, as a multiple of what is needed

parts_missing = case_rule(
    __name__,
    "parts_missing",
    "Along the axis tp, each rank stores and writes its own part of a layer. Without tensor parallelism there are no parts.",
    "Complete exercise 4 (tensor parallelism) in the same folder, or copy its solution there.",
    "parts",
)
case_rule(
    __name__,
    "mesh_computes_other",
    "The ranks of a mesh together must compute what one process computes: each token of a global batch once, with the whole "
    "model.",
    "Along dp, give each rank different sequences. For context parallelism, give each rank its tokens with shard_sequence(), the "
    "positions of these tokens, and ring_attention() over the group of cp.",
    "divided",
    "computed",
)
case_rule(
    __name__,
    "axes_in_wrong_order",
    "Tensor parallelism communicates several times in each layer, and the network between nodes is slower than the links "
    "between the GPUs of a node.",
    'Give init_device_mesh the axes in the order ("pp", "dp", "cp", "tp"): the ranks of the last axis follow each other.',
    "order",
)
case_rule(
    __name__,
    "axis_not_averaged",
    "Ranks along dp and ranks along cp compute gradients of different tokens. Without the mean over both axes, their parameters "
    "become different.",
    "Divide by the number of ranks along dp and cp, and sum with torch.distributed.all_reduce over the group of both axes.",
    "averaged",
)
norm_wrong = case_rule(
    __name__,
    "norm_wrong",
    "If ranks compute different norms, they scale their gradients with different factors, and train a different model than "
    "one process.",
    "Divide the squares of parameters that all ranks of tp have by the size of tp, and add the sums over the group of pp and tp "
    "with torch.distributed.all_reduce.",
    "clipped",
)
checkpoint_parts = case_rule(
    __name__,
    "checkpoint_parts",
    "A checkpoint must contain all parameters and moments. If each rank writes whole tensors, it takes more memory and time with "
    "each GPU that is added.",
    "Return the parameters and the state of the optimizer: DTensor.from_local with Shard(dimension) for a divided tensor, and "
    "with Replicate() for the others.",
    "state",
    after=(parts_missing,),
)
case_rule(
    __name__,
    "mesh_cannot_resume",
    "A job often continues on a different number of GPUs.",
    "Load with torch.distributed.checkpoint.load into the tensors of checkpoint_state(), and give each DTensor the dimension "
    "along which the ranks of tp divide the parameter.",
    "resumed",
    after=(parts_missing, checkpoint_parts),
)


def _after_backward(step: TracedStep) -> list[Moment]:
    """The calls between the last backward pass of a block and the optimizer, in groups of several ranks."""
    last = max(step.places("backward"), default=0)
    calls = {id(each) for each in step.traced.moments[last:]}
    return [each for each in step.calls() if id(each) in calls and each.phase != "optimizer" and len(each.group) > 1]


@of_step(
    why="Each call has a fixed cost, and each axis of the mesh that is averaged alone sends the gradients once more.",
    fix='Create one group for both axes, mesh["dp", "cp"]._flatten("samples").get_group(), and send all gradients in one '
    "all_reduce.",
)
def axes_averaged_alone(step: TracedStep) -> Seen | None:
    """The gradients are averaged in many calls."""
    calls = [each for each in _after_backward(step) if each.name in ("all_reduce", "reduce_scatter", "all_gather")]
    if len(calls) > MOST_CALLS:
        return Seen(f"{step.who} makes {len(calls)} calls after the backward pass", calls[0].where)
    return None


@of_step(
    why="The norm is one number. Sending all gradients for it takes as long as averaging them.",
    fix="On each rank, add the squares of its own gradients, and sum these numbers with one all_reduce.",
)
def norm_sends_gradients(step: TracedStep) -> Seen | None:
    """More is sent after the backward pass than averaging the gradients takes."""
    calls = _after_backward(step)
    ranks = max((len(each.group) for each in calls), default=1)
    if size_of(calls) > TWICE * 2 * (ranks - 1) / ranks * step.traced.parameters > 0:
        sent, own = mib(size_of(calls)), mib(step.traced.parameters)
        return Seen(f"after the backward pass, {step.who} sends {sent}; its gradients take {own}", calls[-1].where)
    return None
