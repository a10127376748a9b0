"""Whether all ranks make the same calls."""

import math
from collections.abc import Iterator
from dataclasses import replace

from workshop.check.evidence.events import Collective, UnevenJoined, VariablesSeen, Wrapped
from workshop.check.evidence.misuses import NeverAwaited, StopsAtLimit, StopsEarly
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run, collectives_of_groups
from workshop.check.rules.divergence import TO_ONE, reduced_to_one
from workshop.check.rules.parting import parting
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import named

ROUNDED = 1e-4  # relative difference of two numbers that may be equal


@rule(
    why="A rank waits in a collective until all ranks call it: if one makes a different call or none, the others wait or fail.",
    fix="All ranks must call the same collectives in the same order. Move the call out of code that only some ranks reach, "
    "and give all ranks the same number of batches (DistributedSampler, drop_last=True).",
    blocks=True,
    anywhere=True,
)
def collectives_differ(run: Run) -> Said:
    """The ranks call different collectives, or take different numbers of steps."""
    ranks = run.ranks
    if len(ranks) < 2 or any(process.first(UnevenJoined) for process in ranks):
        return
    if run.hung or (run.failed and not run.ended_by_echo):
        return  # the rank that waits or fails explains more than different numbers of steps
    groups = collectives_of_groups(ranks)
    if run.cut:  # at the same step, but not at the same moment
        groups = [(members, [each[: min(map(len, calls))] for each in calls]) for members, calls in groups]
    of_all = next(calls for members, calls in groups if len(members) == len(ranks))
    unequal = filter(None, (_unequal_calls(members, calls) for members, calls in groups))
    if seen := (not run.cut and _uneven_steps(run, of_all)) or next(unequal, None):
        cause = parting(run)
        yield replace(cause, text=f"{seen.text}; {cause.text}") if cause else seen
    elif seen := _unequal_gather(run):
        yield seen


PADDED = (
    "all_gather() needs tensors of the same shape on all ranks: pad them to the largest shape, which all_reduce() with "
    "ReduceOp.MAX finds (with Accelerate: pad_across_processes()), or use all_gather_object()."
)


@rule(
    why="With async_op=True, the call returns before the result is there. Whatever reads the tensor next may get its old values.",
    fix="Call wait() on the handle that the call returns, before the tensor is read; or leave out async_op=True.",
    after=(collectives_differ,),
    anywhere=True,
)
def never_awaited(run: Run) -> Said:
    """No rank waits for the result of an asynchronous collective."""
    for event in lost_collectives(run) if not run.failed else ():
        yield Seen(f"the program calls {event.name}(async_op=True) and never waits for its result", event.where)


@rule(
    why="A rank that stops earlier than the others leaves them waiting for it in the next collective, and the program hangs.",
    fix="Average the value over all ranks with all_reduce() before you compare it, or let rank 0 decide and send the decision "
    "with broadcast().",
    needs=(StopsEarly, StopsAtLimit, VariablesSeen),
    after=(collectives_differ,),
    anywhere=True,
)
def stop_decided_alone(run: Run) -> Said:
    """Each rank decides by a value of its own when to end the training early."""
    ranks = run.trained
    if len(ranks) < 2 or run.failed:
        return
    stops: list[StopsEarly | StopsAtLimit] = [*ranks[0].of(StopsEarly), *ranks[0].of(StopsAtLimit)]
    told: list[tuple[str, list[float]]] = []  # a function that does not run may compare a variable of the same name
    for event in stops:
        found = _own_numbers(ranks, event.names, whole=isinstance(event, StopsAtLimit))
        if (first := next(found, None)) and first not in told:
            told.append(first)
            name, values = first
            own = " and ".join(
                f"{value:.6g} on {named(process)}" for value, process in zip(values, ranks, strict=False)
            )
            yield Seen(f"each rank decides by its own `{name}` when to stop: it is {own}", event.where)


def _own_numbers(ranks: list[Process], names: list[str], whole: bool) -> Iterator[tuple[str, list[float]]]:
    """The variables with one of these names that hold different numbers on the first two ranks before the same step.

    ``whole``: the names are whole, not only their last parts.
    """
    for one, other in zip(*(process.of(VariablesSeen) for process in ranks[:2]), strict=False):
        for name, value in one.numbers.items():
            values = [value, other.numbers.get(name, value)]
            if (name if whole else name.rpartition(".")[2]) in names and all(map(math.isfinite, values)):
                counts = all(float(each).is_integer() for each in values)
                # A rank may have only a variable of a different function with this name, which does not change.
                change = {
                    len({each.numbers.get(name) for each in of_one.of(VariablesSeen)}) > 1 for of_one in ranks[:2]
                }
                if not counts and len(change) == 1 and not math.isclose(*values, rel_tol=ROUNDED):
                    yield name, values


def lost_collectives(run: Run) -> list[NeverAwaited]:
    """The asynchronous collectives for which no rank has waited."""
    ends = [[each for each in process.of(NeverAwaited) if each.name != "isend"] for process in run.trained]
    return ends[0] if ends and all(ends) else []


def _uneven_steps(run: Run, calls: list[list[Collective]]) -> Seen | None:
    ranks = run.ranks
    steps = [len(process.steps) for process in ranks]
    backwards = [sum(each.sync is not False for each in process.backwards) for process in ranks]
    counts, word = (steps, "steps") if len(set(steps)) > 1 or run.divided else (backwards, "backward passes")
    wrapped = any(process.first(Wrapped) for process in ranks)
    if len(set(counts)) == 1 or not (wrapped or any(calls)):
        return None
    if all(process.rank is None for process in ranks):
        return None  # without a group, such as the trainers of a parameter server
    idle = [process for process in ranks if not process.steps and not process.backwards]
    if idle and not wrapped and any(call.group for process in ranks for call in process.of(Collective)):
        return None  # ranks with a role of their own, such as those that only generate the samples
    if not wrapped and len(set(map(len, calls))) == 1:
        if len(set(backwards)) == 1:
            return None  # rank 0 takes the steps and sends the parameters
        if run.asked is None and 0 < len(calls[0]) < min(steps):
            return None  # between two collectives, each rank trains on its own, as in federated learning
    text = ", ".join(f"rank {process.rank} {count}" for process, count in zip(ranks, counts, strict=True))
    shorter = ranks[counts.index(min(counts))]
    seen = f"the ranks take different numbers of {word}: {text}"
    reduced = reduced_to_one(shorter)
    if reduced and len({sum(call.where == reduced for call in each) for each in calls}) == 1:
        last = f"before rank {shorter.rank} ended, reduce() at {reduced} gave its result to one rank only"
        return Seen(f"{seen}; {last}", reduced, fix=TO_ONE)
    return Seen(seen, next((event.where for _, event in reversed(shorter.events) if event.where), ""))


def _unequal_gather(run: Run) -> Seen | None:
    """The collective after which a run has failed, if each rank gives it a tensor of another shape."""
    calls = [process.of(Collective) for process in run.ranks]
    if not run.failed or not all(calls) or len({len(each) for each in calls}) > 1:
        return None
    last = [each[-1] for each in calls]
    first, *others = last
    alike = all((each.name, each.where) == (first.name, first.where) for each in others)
    if not alike or "gather" not in first.name or len({each.shape for each in last}) == 1:
        return None
    shapes = " and ".join(
        f"{list(each.shape or ())} on {named(rank)}" for each, rank in zip(last, run.ranks, strict=True)
    )
    return Seen(f"{first.name}() gets a tensor of the shape {shapes}, and fails", first.where, fix=PADDED)


def _unequal_calls(ranks: list[Process], calls: list[list[Collective]]) -> Seen | None:
    for number, together in enumerate(zip(*calls, strict=False), 1):
        if len({(call.name, call.common_shape) for call in together}) > 1:
            text = ", ".join(
                f"rank {process.rank} calls {call.name}{'' if call.shape is None else list(call.shape)} at {call.where}"
                for process, call in zip(ranks, together, strict=True)
            )
            return Seen(f"collective {number}: {text}", together[0].where)
    lengths = [len(each) for each in calls]
    longer, shortest = lengths.index(max(lengths)), min(lengths)
    if shortest == lengths[longer]:
        return None
    extra = calls[longer][shortest]
    return Seen(f"only rank {ranks[longer].rank} calls {extra.name}", extra.where)
