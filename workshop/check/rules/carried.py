"""Why a second start differs from an uninterrupted run: state of the training loop that it does not restore."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from workshop.check.evidence.events import (
    ModelCopied,
    ModelEvaluated,
    ModelUpdated,
    Saved,
    StateLoaded,
    StepBegun,
    VariablesSeen,
)
from workshop.check.evidence.run import Process, Run, Step
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules.words import listed, named
from workshop.check.scenarios import Split

ANY = re.compile("")
BEST = re.compile(r"best|patience|bad_epochs|no_improve|\bwait\b", re.IGNORECASE)
# What was seen, what to do, the line ("": where the checkpoint is loaded), and the origin.
Cause = tuple[str, str, str, str]


def first_cause(whole: Run, split: Split) -> Cause | None:
    """The state that the second start does not restore; None if the evidence names none."""
    done = len(split.first.trained[0].steps)
    shard = _shard_saved(split.first)
    lost = shard or _on_one_rank(split.second) or _same_generator(whole, split, done)
    return lost or _begun_again(whole, split, done) or _copied_later(whole, split.second)


def _copied_later(whole: Run, second: Run) -> Cause | None:
    """A copy that never changes, such as the reference model of DPO, is made of the loaded model instead of the first one."""
    base, process = whole.trained[0], second.trained[0]
    updated = {each.model for each in base.of(ModelUpdated)}
    for before, now in zip(base.of(ModelCopied), process.of(ModelCopied), strict=False):
        same = (before.where, before.names) == (now.where, now.names)
        if same and before.model not in updated and difference(before.weights, now.weights) > CLOSE:
            seen = f"the second start copies {now.model} after it has loaded the checkpoint, so the copy has trained parameters"
            fix = (
                "Make the copy before the checkpoint is loaded, or save the state_dict() of the copy too, and load it."
            )
            return seen, fix, now.where, ""
    return None


def copy_lost(whole: Run, second: Run, done: int) -> Cause | None:
    """The second start evaluates a model with other parameters than the uninterrupted run, after the same step."""
    due = {(steps, each.model, *each.names): each for steps, each in _evaluated(whole.trained[0], 0)}
    for steps, each in _evaluated(second.trained[0], done):
        # Before its first step a program may call the model only to initialize it, and load the checkpoint afterwards.
        expected = steps > done and due.get((steps, each.model, *each.names))
        if expected and difference(expected.weights, each.weights) > CLOSE:
            seen = (
                f"after the second start, {each.model} is evaluated with different parameters than in an uninterrupted run, "
                "although the optimizer has the same ones: a copy, such as an EMA, is not restored"
            )
            fix = "Save the state_dict() of the copy in the checkpoint too, and load it where the checkpoint is loaded."
            return seen, fix, "", "loading:model restored"
    return None


def _evaluated(process: Process, done: int) -> Iterator[tuple[int, ModelEvaluated]]:
    """The models that are evaluated, each with the number of steps before; ``done`` are those of an earlier run.

    If a program evaluates two models of one class after the same step, they cannot be told apart.
    """
    found = [
        (done + sum(step.seconds <= seconds for step in process.steps), event)
        for seconds, event in process.timed(ModelEvaluated)
    ]
    names = Counter((steps, event.model) for steps, event in found)
    yield from (pair for pair in found if names[pair[0], pair[1].model] == 1)


def _on_one_rank(second: Run) -> Cause | None:
    """Only some ranks load the state of the optimizer, and the others begin with an empty one."""
    loads = [process.first(StateLoaded) for process in second.trained]
    without = [process for process, load in zip(second.trained, loads, strict=True) if load is None]
    load = next((each for each in loads if each), None)
    if load and without and all(process.steps[0].before.state == 0 for process in without):
        seen = f"{named(without[0])} does not load the optimizer state"
        return seen, "Call load_state_dict() of the optimizer on every rank.", load.where, ""
    return None


def _shard_saved(first: Run) -> Cause | None:
    """Only one rank saves the optimizer state, and only its own part."""
    saves = [[each for each in process.of(Saved) if each.moments] for process in first.trained]
    saving = [each[0] for each in saves if each]
    if (
        len(saves) > 1 == len(saving)
        and first.trained[0].steps[0].before.sharded
        and saving[0].moments <= saving[0].own
    ):
        seen = f"one rank saves the optimizer state, but only the {saving[0].moments:,} elements of its own shard"
        fix = (
            "Gather the optimizer state of all ranks before you save it: FSDP.optim_state_dict(), or get_state_dict()."
        )
        return seen, fix, saving[0].where, "state"
    return None


def _same_generator(whole: Run, split: Split, done: int) -> Cause | None:
    """After the second start all ranks have the same state of a generator, although each rank had its own before."""
    due = [_variables(process, process.steps[done : done + 1]) for process in whole.trained]
    begun = [_variables(process, process.steps[:1]) for process in split.second.trained]
    if len(due) < 2 or len(due) != len(begun) or not all((*due, *begun)):
        return None
    for name in begun[0].states if begun[0] else ():
        own, now = ([each and each.states.get(name) for each in ranks] for ranks in (due, begun))
        if None not in (*own, *now) and len(set(now)) == 1 and len(set(own)) == len(own):
            seen = f"all ranks continue with the same state of the generator `{name}`, but each should have its own"
            fix = (
                "Save the states of all ranks (all_gather_object), and let each rank restore its own with set_state()."
            )
            return seen, fix, "", f"restored:{name}"
    return None


def best_lost(whole: Run, split: Split) -> Cause | None:
    """The best value so far, or a count of epochs without a better one, has its first value again."""
    cause = _begun_again(whole, split, len(split.first.trained[0].steps), BEST)
    return (f"after the second start {cause[0]}", *cause[1:]) if cause else None


def _begun_again(whole: Run, split: Split, done: int, names: re.Pattern[str] = ANY) -> Cause | None:
    """Variables with such names that change in an uninterrupted run have their first values again."""
    base, first, second = (run.trained[0] for run in (whole, split.first, split.second))
    start, due = (_variables(base, base.steps[number : number + 1]) for number in (0, done))
    last, same = (_variables(process, process.steps[done - 1 : done]) for process in (base, first))
    begun = _variables(second, second.steps[:1])
    if not (start and due and last and same and begun):
        return None
    for kind, what in (("numbers", "begins again with"), ("states", "")):
        values = [getattr(each, kind) for each in (start, due, last, same, begun)]
        common = set.intersection(*map(set, values))
        initial, expected, before, again, now = values
        lost = [
            name
            for name in _in_order(now, common)
            if now[name] == initial[name] != expected[name] and before[name] == again[name] and names.search(name)
        ]
        lost = [name for name in lost if isinstance(now[name], int)] or lost  # others are often computed from them
        if lost and what:
            shown = listed([f"`{name}` {what} {now[name]:g} instead of {expected[name]:g}" for name in lost[:3]])
            fix = f"Save {listed(lost[:3])} in the checkpoint, and assign it where the checkpoint is loaded."
            return shown, fix, "", "restored"
        if lost:
            seen = f"the generator `{lost[0]}` begins again with its first state"
            fix = "Save the state of the generator (get_state()) of each rank, or seed it with a function of the step."
            return seen, fix, "", f"made:{lost[0]}"
    return None


def _in_order(now: dict[str, float], common: set[str]) -> list[str]:
    """The common names, in the order of one of the dictionaries."""
    return [name for name in now if name in common]


def _variables(process: Process, steps: Sequence[Step]) -> VariablesSeen | None:
    """The variables before a step, the first of these."""
    seen: VariablesSeen | None = None
    for _, event in process.events if steps else ():
        if isinstance(event, VariablesSeen):
            seen = event
        elif isinstance(event, StepBegun) and event is steps[0].before:
            return seen
    return None
