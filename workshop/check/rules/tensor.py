"""Programs that build tensor and sequence parallelism by hand (stage 06): what each rank stores, computes and sends."""

from collections.abc import Iterator

from workshop.check.evidence.events import StepTraced
from workshop.check.evidence.run import Run
from workshop.check.rules.rule import NotJudged, Seen
from workshop.check.rules.traced import BIT, TracedStep, mib, of_step, size_of
from workshop.check.rules.tried import case_rule, instead

SPARED = 0.8  # of what other ranks can store for a rank: the least that it must not store
HALVES = (
    11.5  # of an all-reduce of an activation, per block and step: needed are 8, and 10 if inputs are gathered again
)
PART = 1.05  # times the share of a rank: the most tokens for which it may compute norms


def of_pytorch(run: Run) -> Iterator[str]:
    """The lines that created optimizers of DTensors."""
    of = (each.optimizers.items() for each in run.all(StepTraced))
    return (line for lines in of for line, classes in lines if "DTensor" in classes)


instead(__name__, "tensor_of_pytorch", "DTensor (parallelize_module)", of_pytorch, StepTraced)

# ---------------------------------------------------------------- parts of the linear layers


@of_step(
    why="If each rank stores all matrices, more GPUs do not reduce the memory per GPU.",
    fix="Replace each parameter of a linear layer with the part of this rank, as a copy (clone()), because a view keeps the "
    "memory of the whole tensor in use. Keep no reference to the original layer.",
)
def linear_whole(step: TracedStep) -> Seen | None:
    """A rank stores more than its part of the matrices."""
    if step.spared < SPARED:
        own, all_of_it = mib(step.traced.held), mib(step.held_alone)
        return Seen(f"{step.who} stores {own} between two steps; one process alone stores {all_of_it}", step.optimizer)
    return None


@of_step(
    why="If each rank computes whole layers, more GPUs do not make a step faster.",
    fix="Multiply only with this rank's part of each weight: communicate activations with all_reduce, not parameters.",
    after=(linear_whole,),
)
def linear_computed_whole(step: TracedStep) -> Seen | None:
    """A rank computes more than its share of the matrix products in the blocks."""
    if step.computed > 1 / step.ranks + BIT:
        seen = f"{step.who} computes {step.computed:.0%} of the matrix products of the blocks; its share is {1 / step.ranks:.0%}"
        calls = step.calls("forward", "")
        return Seen(seen, calls[0].where if calls else step.optimizer)
    return None


WHOLE_LAYERS = (linear_whole, linear_computed_whole)
linear_case_fails = case_rule(
    __name__,
    "linear_case_fails",
    "Each rank has computed one term of a sum. A sum that is missing, or computed twice, gives a different model.",
    "Sum the output of a row-parallel layer with all_reduce in the forward pass only, and the gradient of the input of a "
    "column-parallel layer in the backward pass only. Add the bias after the sum, keep requires_grad, and pass the group.",
    "linear-layers", "linear-model", "linear-group", "linear-undivided",
    after=WHOLE_LAYERS,
)  # fmt: skip

# ---------------------------------------------------------------- few bytes


@of_step(
    why="The ranks wait for each communication inside a block, so its bytes limit the speed of tensor parallelism.",
    fix="Query, key and value have the same input: apply the pair of functions once, in a hook of the attention "
    "(register_forward_pre_hook). Per block and step, 4 calls of all_reduce are enough or, with sequence parallelism, "
    "4 gathers and 4 of reduce_scatter.",
    after=WHOLE_LAYERS,
)
def blocks_send_more(step: TracedStep) -> Seen | None:
    """More is communicated than four sums of an activation for each block."""
    blocks = sum(each.what == "forward" for each in step.alone.moments) if step.alone else 0
    half, calls = (step.ranks - 1) / step.ranks * step.activation, step.calls()
    if size_of(calls) > HALVES * half * blocks > 0:
        sent, needed = mib(size_of(calls)), mib(8 * half * blocks)
        seen = f"{step.who} sends {sent} in a step; four sums of an activation in each of {blocks} blocks take {needed}"
        return Seen(seen, calls[0].where)
    return None


# ---------------------------------------------------------------- parts of the sequence


@of_step(
    why="If each rank computes norms and residual additions for all tokens, it stores their inputs for all tokens too, so "
    "more GPUs do not reduce this memory.",
    fix="Split the sequence before the first block and gather it after the last norm. Replace each all-reduce with its two "
    "halves: reduce_scatter after a row-parallel layer, and a gather before a column-parallel one.",
    after=WHOLE_LAYERS,
)
def norms_whole(step: TracedStep) -> Seen | NotJudged | None:
    """A rank computes norms, or has inputs of blocks, for more than its part of the tokens."""
    alone = step.alone
    if not alone or step.ranks == 1:
        return None
    if not alone.normalized:
        return NotJudged("for which tokens a rank computes norms: the program calls no layer_norm")
    most = PART / step.ranks
    if step.traced.normalized > most * alone.normalized:
        share = step.traced.normalized / alone.normalized
        calls = step.calls("forward", "")
        where = calls[0].where if calls else step.optimizer
        return Seen(
            f"{step.who} computes {share:.0%} of the norms of one process; its share is {1 / step.ranks:.0%}", where
        )
    begins = [each for each in step.traced.moments if each.what == "forward"]
    if whole := next((each for each in begins if each.bytes > most * step.activation > 0), None):
        seen = f"the input of block {int(whole.name) + 1} of {step.who} has all tokens, but should have 1/{step.ranks} of them"
        return Seen(seen, whole.where)
    return None


case_rule(
    __name__,
    "sequence_case_fails",
    "With sequence parallelism, each rank uses norms and some biases for its tokens only, so it has only a term of their "
    "gradients.",
    "Sum the gradients of all norms, and of the biases of row-parallel layers, in a hook (Tensor.register_hook) that calls "
    "all_reduce. The backward pass of a gather is a reduce-scatter only where each rank has a term of the "
    "gradient. Divide the sequence along dimension 1.",
    "sequence-model", "sequence-undivided",
    after=(*WHOLE_LAYERS, linear_case_fails, norms_whole),
)  # fmt: skip

# ---------------------------------------------------------------- the whole state

case_rule(
    __name__,
    "state_divided",
    "A checkpoint with the part of one rank cannot be loaded into the model, and the other parts are lost.",
    "On all ranks, gather each divided parameter along its dimension (all_gather), under the name that it had before.",
    "whole-state",
    after=(*WHOLE_LAYERS, linear_case_fails),
)
