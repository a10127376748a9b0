"""State of which each rank has its own, such as random numbers, if a second start restores that of one rank on all ranks."""

import re
from collections.abc import Iterator
from itertools import pairwise

from workshop.check.evidence.events import CheckpointCalled, EntriesSaved, Saved, VariablesSeen
from workshop.check.evidence.process import Process, Step
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules.alike import is_reproducible
from workshop.check.rules.carried import Cause, variables
from workshop.check.rules.words import listed, named
from workshop.check.scenarios import Split

SHARDS = (
    "Keep the tensors of a sharded model as DTensors, without to_local(): torch.distributed.checkpoint takes a plain tensor for "
    "a copy that all ranks have, but writes the part of each rank of a DTensor."
)
TENSOR = 4  # values of a tensor that is no single number
GATHER = "Gather the state of all ranks before you save it (all_gather_object), and let each rank restore its own."


def one_for_all(whole: Run, split: Split) -> Cause | None:
    """The state of one rank that all ranks have after the second start; None if the evidence shows none."""
    if not len(whole.trained) == len(split.first.trained) == len(split.second.trained) > 1:
        return None
    done = len(split.first.trained[0].steps)  # the steps of the rank that was killed after it had saved
    due = [process.steps[done : done + 1] for process in whole.trained]
    if not all(due):
        return None
    entry = _one_entry(whole, split, [step for (step,) in due])
    found = entry or _same_generator(whole, split, due) or _same_samples(whole, split, due)
    return found or _same_part(split, due) or _place_of_another(whole, split)


def _one_entry(whole: Run, split: Split, due: list[Step]) -> Cause | None:
    """An entry of a distributed checkpoint has the same key on all ranks, but different values."""
    saved = [process.of(EntriesSaved) for process in split.first.trained]
    last = min(map(len, saved)) - 1
    loads = any(event.name == "load" for event in split.second.all(CheckpointCalled))
    if last < 0 or not loads or not _changed(whole, split, due):
        return None
    first, *others = [events[last] for events in saved]
    keys = [key for key, value in first.entries.items() if any(one.entries.get(key, value) != value for one in others)]
    if not keys:
        return None
    key, sharded = keys[0], due[0].before.sharded
    if sharded and len(keys) > 1 and any(key.endswith(name) for name in due[0].before.names if name):
        part = key.removesuffix(next(name for name in due[0].before.names if name and key.endswith(name))).rstrip(".")
        seen = f'the ranks save different tensors under "{part}", {listed(keys)}, and the checkpoint keeps those of one rank'
        return seen, SHARDS, first.where, f"held:{part.rpartition('.')[2]} key:{part.rpartition('.')[2]}"
    seen = f'the ranks save different values under the key "{key}", and the checkpoint keeps that of one rank'
    fix = (
        f'Give each rank a key of its own, such as f"{key}_{{rank}}": torch.distributed.checkpoint takes plain values '
        "with the same key for copies of one value."
    )
    return seen, fix, first.where, f"key:{key.rpartition('.')[2]}"


def _changed(whole: Run, split: Split, due: list[Step]) -> bool:
    """Whether a rank of the second start has other random numbers or samples, although the runs are reproducible."""
    for base, process in zip(whole.trained, split.first.trained, strict=True):
        if any(one.random != other.random for one, other in zip(base.steps, process.steps, strict=False)):
            return False
    begun = [process.steps[0] for process in split.second.trained]
    return any(one.random != own.random or one.keys != own.keys for one, own in zip(due, begun, strict=True))


def _trains_differently(whole: Run, split: Split, due: list[list[Step]]) -> bool:
    """Whether the first step of the second start has other samples or gradients than an uninterrupted run."""
    begun = [process.steps[0] for process in split.second.trained]
    return any(
        own.rows != one.rows or difference(own.before.gradients, one.before.gradients) > CLOSE
        for (one,), own in zip(due, begun, strict=True)
    )


def _draws_in_steps(process: Process, name: str) -> bool:
    """Whether a generator changes in most steps, not only now and then, as that of a demonstration does."""
    states = [event.states.get(name) for event in process.of(VariablesSeen)]
    return 2 * sum(one != other for one, other in pairwise(states)) >= len(states) - 1


def _same_generator(whole: Run, split: Split, due: list[list[Step]]) -> Cause | None:
    """After the second start all ranks have the same state of a generator, although each rank had its own before.

    Only a generator that the training uses matters: then the samples, or else the gradients, are no longer the same.
    """
    reproducible = is_reproducible(whole.trained[0].steps, split.first.trained[0].steps)
    if reproducible and not _trains_differently(whole, split, due):
        return None
    before = [variables(process, steps) for process, steps in zip(whole.trained, due, strict=True)]
    begun = [variables(process, process.steps[:1]) for process in split.second.trained]
    if not all((*before, *begun)):
        return None
    for name in begun[0].states if begun[0] else ():
        own, now = ([each and each.states.get(name) for each in ranks] for ranks in (before, begun))
        trains = reproducible or _draws_in_steps(whole.trained[0], name)
        if None not in (*own, *now) and len(set(now)) == 1 and len(set(own)) == len(own) and trains:
            seen = f"all ranks continue with the same state of the generator `{name}`, but each should have its own"
            fix = (
                "Save the states of all ranks (all_gather_object), and let each rank restore its own with set_state()."
            )
            return seen, fix, "", f"restored:{name}"
    return None


def _same_samples(whole: Run, split: Split, due: list[list[Step]]) -> Cause | None:
    """After the second start all ranks train on the samples of one rank, although each rank had its own."""
    begun = [set(process.steps[0].keys) for process in split.second.trained]
    own = [set(steps[0].keys) for steps in due]
    first = [set(process.steps[0].keys) for process in whole.trained]
    if any(each != begun[0] for each in begun) or begun[0] not in own or not begun[0]:
        return None
    if any(one & other for ranks in (own, first) for number, one in enumerate(ranks) for other in ranks[:number]):
        return None  # they share samples in an uninterrupted run too
    rank = named(whole.trained[own.index(begun[0])])
    saving = [each for process in split.first.processes for each in _last_save(process)]
    seen = f"after the second start all ranks train on the samples of {rank}, but each should have its own"
    return seen, GATHER, saving[0].where if len(saving) == 1 else "", "of-first saved"


def _same_part(split: Split, due: list[list[Step]]) -> Cause | None:
    """After the second start all ranks have the part of one rank of the parameters that an optimizer divides among them."""
    own, begun = [step.before for (step,) in due], [process.steps[0].before for process in split.second.trained]
    # The models of the ranks may also differ because they are averaged only from time to time.
    if any(each.of_model or each.trainer != own[0].trainer for each in (*own, *begun)):
        return None
    for index, name in enumerate(own[0].names):
        before, now = ([[each.weights[index]] for each in ranks] for ranks in (own, begun))
        divided = all(difference(before[0], each) > CLOSE for each in before[1:])
        of = [number for number, each in enumerate(before) if all(difference(each, one) <= CLOSE for one in now)]
        if divided and of:
            whose = named(split.first.trained[of[0]])
            what = name or "the parameters of an optimizer"
            seen = f"after the second start all ranks have the part of {whose} of {what}, but each should have its own"
            return seen, GATHER, "", "of-first here"
    return None


def _place_of_another(whole: Run, split: Split) -> Cause | None:
    """After the second start the rank that has saved continues at its place in the data, but another one does not."""
    done = len(split.first.trained[0].steps)
    if len({len(process.steps) for process in whole.trained}) > 1:
        return None  # each rank has its own number of steps, so they are not at the same place
    alike: list[Process] = []
    apart: list[Process] = []
    for base, begun, again in zip(whole.trained, split.first.trained, split.second.trained, strict=True):
        before = zip(base.steps[:done], begun.steps, strict=False)
        if len(base.steps) <= done or any(one.keys != other.keys for one, other in before) or not again.steps[0].keys:
            return None
        (alike if again.steps[0].keys == base.steps[done].keys else apart).append(again)
    saving = [each for process in split.first.processes for each in _last_save(process)]
    if not apart or split.second.trained[0] not in alike:
        return None
    first = named(alike[0])
    seen = f"after the second start {named(apart[0])} trains on other samples than in an uninterrupted run, {first} does not: "
    seen += f"the checkpoint contains the place of {first} in the data, or another value of this rank"
    return seen, GATHER, saving[0].where if len(saving) == 1 else "", "of-first saved"


def saved_apart(whole: Run, split: Split, done: int) -> Cause | None:
    """The second start saves other tensors than the uninterrupted run, after the same step, in a file of the same name."""
    due = dict(_saves(whole.trained[0], 0))
    for (path, steps), now in dict(_saves(split.second.trained[0], done)).items():  # the last one after each step
        then = due.get((path, steps))
        if steps <= done or then is None or len(then.tensors) != len(now.tensors):
            continue
        pairs = [(one, other) for one, other in zip(then.tensors, now.tensors, strict=True) if one and other]
        if any(len(one[1]) >= TENSOR and difference([one], [other]) > CLOSE for one, other in pairs):
            name = re.sub(r"\.(tmp|part)$", "", path.rpartition("/")[2])
            seen = (
                f"after the second start, {name} is saved with other values than in an uninterrupted run, although the "
            )
            seen += "optimizer has the same parameters: a copy, such as an EMA, is not restored"
            fix = "Save the copy in the checkpoint too, and load it where the checkpoint is loaded."
            return seen, fix, "", "anew restored"
    return None


def _saves(process: Process, done: int) -> Iterator[tuple[tuple[str, int], Saved]]:
    """The files with tensors that a process saves, by the end of the path and the number of steps before."""
    for seconds, event in process.timed(Saved):
        if event.path and event.tensors:
            steps = done + sum(step.seconds <= seconds for step in process.steps)
            yield ("/".join(event.path.split("/")[-2:]), steps), event


def _last_save(process: Process) -> list[Saved]:
    """The last file that a process saves, in a list. (Collectives of objects call torch.save too, without a file.)"""
    return [event for event in process.of(Saved) if event.path][-1:]
