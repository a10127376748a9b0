"""Programs that build expert parallelism by hand (stage 06): which rank has which experts, and where tokens are sent."""

from collections.abc import Iterator

from workshop.check.evidence.events import Moment, StepTraced
from workshop.check.evidence.run import Run
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.rules.traced import COLLECTIVES, TracedStep, mib, of_step, size_of, steps_of
from workshop.check.rules.tried import case_rule, instead
from workshop.check.scenarios import BUILT_ALONE, WHOLE

SPARED = 0.8  # of what other ranks can store for a rank: the least that it must not store
AGAIN = 1.1  # times the matrix products of one process: the most that all ranks may compute together
SENT = 1.8  # times the tokens, there and back: with one expert for all tokens, the ranks together send less than twice


def of_pytorch(run: Run) -> Iterator[str]:
    """The lines that called an all-to-all with a backward pass."""
    return (line for each in run.all(StepTraced) for line in each.exchanges)


instead(__name__, "exchange_of_pytorch", "all_to_all_single with a backward pass", of_pytorch, StepTraced)

# ---------------------------------------------------------------- each expert on one rank, each token sent once


@of_step(
    why="If each rank stores all experts, more GPUs do not reduce the memory per GPU, and the gradients of all experts are "
    "communicated.",
    fix="Keep only the experts of this rank, and do not sum their gradients with all_reduce. Drop the others at once, also "
    "from lists and attributes.",
)
def experts_everywhere(step: TracedStep) -> Seen | None:
    """A rank stores more than its share of the experts."""
    if step.spared < SPARED:
        own, all_of_it = mib(step.traced.held), mib(step.held_alone)
        return Seen(f"{step.who} stores {own} between two steps; one process alone stores {all_of_it}", step.optimizer)
    return None


@rule(
    why="If several ranks compute the same tokens, more GPUs do not make a step faster.",
    fix="Send each token to the rank of its expert with all_to_all_single, and compute there only the rows that arrive.",
    runs=(WHOLE, BUILT_ALONE),
    needs=(StepTraced,),
    after=(experts_everywhere,),
)
def experts_computed_twice(run: Run, alone: Run) -> Said:
    """All ranks together compute more than one process."""
    steps = steps_of(run, alone)
    together = sum(each.traced.flops for each in steps)
    single = next((each.alone.flops for each in steps if each.alone), 0)
    if together > AGAIN * single > 0:
        seen = f"together, the ranks compute {together / single:.1f} times the matrix products of one process"
        largest = max(steps, key=lambda each: each.traced.flops)
        yield Seen(seen, next((each.where for each in forward_calls(largest)), largest.optimizer))


def forward_calls(step: TracedStep) -> list[Moment]:
    """The calls between the first block of the forward pass and the backward pass."""
    moments = step.traced.moments
    first, last = (next(iter(step.places(what)), len(moments)) for what in ("forward", "backward"))
    return [each for each in moments[first:last] if each.what == "call" and each.name in COLLECTIVES]


@rule(
    why="Each rank needs the tokens of its own experts only. With many GPUs the network limits the speed.",
    fix="Send each token to one rank only, with all_to_all_single and the number of rows for each rank "
    "(input_split_sizes, output_split_sizes), which the ranks exchange first.",
    runs=(WHOLE, BUILT_ALONE),
    needs=(StepTraced,),
    after=(experts_everywhere,),
)
def tokens_to_all(run: Run, alone: Run) -> Said:
    """In the forward pass, all ranks together send more than each token once, and once back."""
    steps = steps_of(run, alone)
    calls = [call for step in steps for call in forward_calls(step)]
    begins = [
        each for step in steps for each in step.traced.moments if each.what == "forward" and each.phase == "forward"
    ]
    needed = 2 * (len(steps) - 1) / max(len(steps), 1) * size_of(begins)
    if steps and not begins:
        yield NotJudged("how many tokens are sent: the program has no blocks")
    elif size_of(calls) > SENT * needed > 0:
        largest = max(calls, key=lambda each: each.bytes)
        seen = f"in the forward pass the ranks send {mib(size_of(calls))}; sending each token to its expert and back takes "
        yield Seen(f"{seen}about {mib(needed)}", largest.where)


DISTRIBUTED = (experts_everywhere, experts_computed_twice, tokens_to_all)
experts_case_fails = case_rule(
    __name__,
    "experts_case_fails",
    "A layer that works only for equal loads fails in training: the router decides how many tokens each rank gets.",
    "Exchange the counts first. Sort the rows that arrive by expert, and restore their order in the outputs (argsort). In the "
    "backward pass of the exchange, swap both lists of all_to_all_single. All ranks must call it, even a rank without tokens. "
    "Divide the gradients of experts by the number of ranks.",
    "experts-layer", "experts-group", "no-tokens",
    after=DISTRIBUTED,
)  # fmt: skip

# ---------------------------------------------------------------- capacity and balance

case_rule(
    __name__,
    "capacity_case_fails",
    "If the result of a token depends on other sequences or on later tokens, it depends on the number of ranks, and a "
    "language model sees the tokens that it must predict.",
    "Count per sequence, in the order of the tokens, how many choices an expert has had (one_hot and cumsum). Keep the first "
    "ones, up to the capacity (rounded up), and send no others.",
    "capacity",
    after=(experts_case_fails,),
)
case_rule(
    __name__,
    "balance_case_fails",
    "The mean of the losses of single ranks is a different number than the loss of the global batch, and a loss without the "
    "right gradient does not balance the experts.",
    "Sum the counts of the choices (before the capacity) and the probabilities over the ranks with all_reduce, and add the "
    "gradient of the probabilities of this rank, times the number of ranks (Tensor.detach).",
    "balance",
    after=(experts_case_fails,),
)
case_rule(
    __name__,
    "experts_impossible",
    "An impossible argument that is accepted fails later, with an error that does not name it.",
    "On all ranks, raise the ValueErrors that the docstring names, before the first call of all_to_all_single.",
    "experts-impossible",
)
