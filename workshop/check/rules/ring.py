"""Programs that build ring attention by hand: what each rank sends and stores, and what it computes meanwhile."""

from collections.abc import Iterator

from workshop.check.evidence.events import Moment
from workshop.check.rules.built import built_differs
from workshop.check.rules.rule import Seen
from workshop.check.rules.traced import TracedStep, mib, of_step, size_of
from workshop.check.rules.tried import case_rule
from workshop.check.rules.words import plural

ROTATE = ("send", "all_to_all")  # they can send a tensor to one rank only
ARRIVE = ("recv", "all_to_all")
GATHER = ("all_gather", "broadcast", "all_reduce", "reduce_scatter")
SMALL = 1 << 12  # bytes: less than the keys and values of a rank
STORED = 1.06  # times its share of the activations of one process: the keys and values of one other rank are 0.12
REDUCED = 1.05  # times the bytes that average the gradients of the parameters
OVERLAPPED = 0.5  # of the messages of the forward pass


def _arrivals(step: TracedStep, phase: str) -> list[tuple[Moment, Moment]]:
    """The receives of a phase: the beginning of each one, and its end, if the program has waited for it."""
    moments = [each for each in step.traced.moments if each.name in ARRIVE and each.phase == phase]
    begins, ends = ([each for each in moments if each.what == what] for what in ("call", "wait"))
    return list(zip(begins, ends, strict=False))


def _computed_meanwhile(step: TracedStep, phase: str) -> Iterator[bool]:
    """For each receive of a phase: whether the rank computes products between its beginning and its end."""
    return (end.flops > begin.flops for begin, end in _arrivals(step, phase))


# ---------------------------------------------------------------- the whole program


attention_fails = case_rule(
    __name__,
    "attention_fails",
    "An attention that is right only for the sizes of the exercise gives wrong results in your own models.",
    "Compare output and gradients with scaled_dot_product_attention: causal and not, with fewer heads of keys, with large "
    "scores (subtract the total before exp), with bfloat16 (sum in float32), and in a group. Raise each ValueError that "
    "the docstring names.",
    "sequence-shards", "attention", "large-scores", "attention-gradients", "low-precision", "one-member", "sequence-errors",
)  # fmt: skip

# ---------------------------------------------------------------- goal 1: the forward pass


@of_step(
    why="A rank that stores the keys and values of all ranks needs more memory the longer the whole sequence is.",
    fix="Send the keys and values to the next rank only, and receive those of the previous rank (batch_isend_irecv): N - 1 "
    "times with N ranks. Add the result for each block to the output with the online softmax.",
)
def keys_gathered(step: TracedStep) -> Seen | None:
    """The forward pass calls a collective that gives each rank the keys and values of all ranks."""
    calls = [each for each in step.calls("forward", names=GATHER) if each.bytes > SMALL]
    if step.ranks > 1 and calls:
        blocks = len(step.places("forward"))
        names = " and ".join(sorted({each.name for each in calls}))
        seen = (
            f"in the forward pass of {plural(blocks, 'layer')}, {step.who} calls {names} {plural(len(calls), 'time')}"
        )
        return Seen(f"{seen} and gets the keys and values of all ranks", calls[0].where)
    return None


@of_step(
    why="A rank that first waits for the next keys and values, and then computes, is idle during each message.",
    fix="Start batch_isend_irecv before the products with the present keys and values, and call wait() after them.",
    after=(keys_gathered,),
)
def rotation_waits(step: TracedStep) -> Seen | None:
    """Nothing is computed while keys and values are under way in the forward pass."""
    meanwhile = list(_computed_meanwhile(step, "forward"))
    if step.ranks > 1 and sum(meanwhile) < OVERLAPPED * len(meanwhile):
        begin, _ = _arrivals(step, "forward")[meanwhile.index(False)]
        seen = f"in the forward pass, {step.who} computes nothing during {len(meanwhile) - sum(meanwhile)} of its"
        return Seen(f"{seen} {len(meanwhile)} receives", begin.where)
    return None


@of_step(
    why="Keys and values of other ranks that stay in memory until the backward pass need as much memory as gathered ones.",
    fix="In the forward pass of a torch.autograd.Function, save only the query, key, value and output of this rank, and the "
    "total. Let the keys and values rotate again in the backward pass.",
    after=(keys_gathered,),
)
def keys_kept(step: TracedStep) -> Seen | None:
    """A layer adds more to the memory of a rank than its share of the activations of one process."""
    own, whole = (
        [moment.held for moment in traced.moments if moment.what == "forward"] if traced else []
        for traced in (step.traced, step.alone)
    )
    if step.ranks == 1 or not own or len(own) != len(whole):
        return None
    grown, share = own[-1] - own[0], (whole[-1] - whole[0]) / step.ranks
    if grown > STORED * share > 0:
        last = step.traced.moments[step.places("forward")[-1]]
        seen = f"the forward pass of {plural(len(own) - 1, 'layer')} stores {mib(grown)} on {step.who}"
        return Seen(f"{seen}; its share of the activations of one process is {mib(share)}", last.where)
    return None


case_rule(
    __name__,
    "sends_more_blocks",
    "The bytes that each rank sends determine how long its messages take.",
    "With N ranks, call batch_isend_irecv N - 1 times, because no other rank needs the last block. Send keys before you expand "
    "them to the heads of the query.",
    "forward-bytes",
    after=(keys_gathered,),
)

# ---------------------------------------------------------------- goal 2: the backward pass


@of_step(
    why="A rank that stores the gradients of all keys and values needs more memory the longer the whole sequence is.",
    fix="Send the gradients of a block of keys and values on to the next rank after the rank has added its terms "
    "(batch_isend_irecv). The last message returns them to the rank of the block.",
    after=(keys_gathered,),
)
def gradients_reduced(step: TracedStep) -> Seen | None:
    """The backward pass sends more in collectives of all ranks than the average of the gradients of the parameters needs."""
    calls = [each for each in step.calls(names=GATHER) if each.phase != "forward"]
    needed = 2 * (step.ranks - 1) / step.ranks * step.whole
    if size_of(calls) > REDUCED * needed > 0:
        sizes = sorted({each.bytes for each in calls}, key=lambda size: -sum(each.bytes == size for each in calls))
        most = next(each for each in calls if each.bytes == sizes[0])
        names = " and ".join(sorted({each.name for each in calls}))
        seen = f"after the forward pass, {step.who} sends {mib(size_of(calls))} in calls of {names}"
        return Seen(f"{seen}; averaging the gradients of the parameters takes {mib(needed)}", most.where)
    return None


@of_step(
    why="A rank that only waits during each message is idle for as long as the message takes.",
    fix="Start batch_isend_irecv for the next keys and values before the products with the present ones, and call wait() after "
    "them. Send the gradients of the last block during these products too.",
    after=(keys_gathered, gradients_reduced),
)
def backward_waits(step: TracedStep) -> Seen | None:
    """Nothing is computed while keys, values or their gradients are under way in the backward pass."""
    meanwhile = list(_computed_meanwhile(step, "backward"))
    if step.ranks > 1 and meanwhile and not any(meanwhile):
        seen = f"in the backward pass, {step.who} computes nothing during its {plural(len(meanwhile), 'receive')}"
        return Seen(seen, _arrivals(step, "backward")[0][0].where)
    return None


case_rule(
    __name__,
    "sends_more_gradients",
    "The bytes that each rank sends determine how long its messages take.",
    "In the backward pass of N ranks, call batch_isend_irecv N - 1 times for keys and values (not again after the last "
    "products), and N times for their gradients.",
    "backward-bytes",
    after=(keys_gathered, gradients_reduced),
)

# ---------------------------------------------------------------- goal 3: the work of each rank

RIGHT = (
    built_differs,
    attention_fails,
    keys_gathered,
    gradients_reduced,
)  # nothing of these found: what is computed is right
case_rule(
    __name__,
    "future_computed",
    "The mask removes scores of keys in the future, so the time to compute them is lost.",
    "Divide the tokens of each rank into two pieces. Skip the products of queries and keys if all keys of the piece are after "
    "all queries, also in the backward pass (look up context parallelism).",
    "scores",
    after=RIGHT,
)
case_rule(
    __name__,
    "work_uneven",
    "All ranks wait for the one that computes most.",
    "Give each rank an early and a late piece of the sequence: of 2 N pieces, rank r gets r and 2 N - 1 - r (look up context "
    "parallelism).",
    "scores-of-ranks",
    after=RIGHT,
)
