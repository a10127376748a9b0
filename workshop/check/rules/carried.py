"""Why a second start differs from an uninterrupted run: state of the training loop that it does not restore."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set

from workshop.check.evidence.events import (
    AcceleratorCalled,
    CheckpointCalled,
    Loaded,
    LoaderStarted,
    ModelCopied,
    ModelEvaluated,
    ModelUpdated,
    Saved,
    StateLoaded,
    StepBegun,
    Trainer,
    VariablesSeen,
)
from workshop.check.evidence.misuses import OthersSeen
from workshop.check.evidence.process import Process, Step
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules.alike import is_reproducible
from workshop.check.rules.words import listed, named
from workshop.check.scenarios import Split

FEW = 3  # a count above which two variables do not agree by chance
ROUNDED = 1e-5  # relative difference up to which two norms count as equal
ANY = re.compile(r"^(?!.*(norm\d?|_params?|mfu|elapsed|trainer\._\w+)$)")  # but not of what is only shown
COPIES = " ".join(f"loading:{name}" for name in ("ema", "average", "swa", "teacher", "target", "shadow"))
COPIED = r"holds:\.(clone|detach|copy)\(|deepcopy\("
FROZEN = " ".join(f"loading:{name}" for name in ("ref", "teacher", "target", "frozen", "old"))
BEST = re.compile(r"best|patience|bad_epochs|no_improve|\bwait\b", re.IGNORECASE)
HELD = (
    "Save it in the checkpoint, and load it where the checkpoint is loaded. The state_dict() of a module has only tensors that "
    "are registered, with self.register_buffer(name, tensor) for example."
)
# What was seen, what to do, the line ("": where the checkpoint is loaded), and the origin.
Cause = tuple[str, str, str, str]


def first_cause(whole: Run, split: Split) -> Cause | None:
    """The state that the second start does not restore; None if the evidence names none."""
    done = len(split.first.trained[0].steps)
    lost = _shard_saved(split.first) or _on_one_rank(split.second) or _reordered(whole, split, done)
    lost = (
        lost
        or _left_out(whole, split, done)
        or _swapped(whole, split, done)
        or _iterated_early(whole, split.second, done)
    )
    lost = lost or _begun_again(whole, split, done) or _copied_later(whole, split.second) or _held_lost(whole, split)
    return lost or _second_model_lost(whole, split) or _part_lost(split) or _saved_by_some(split.first)


def firsts(base: Sequence[Step], rest: Sequence[Step]) -> list[tuple[Step, Step]]:
    """The first step of each optimizer in two runs, if they are the first ones: no other step has changed its parameters."""
    found: dict[Trainer, tuple[Step, Step]] = {}
    for due, own in zip(base, rest, strict=False):
        if own.before.trainer in found or own.before.trainer != due.before.trainer:
            break
        found[own.before.trainer] = due, own
    return list(found.values())


def _first_of_each(steps: Sequence[Step]) -> dict[Trainer, Step]:
    """The first step of each optimizer."""
    return {step.before.trainer: step for step in reversed(steps)}


def _reordered(whole: Run, split: Split, done: int) -> Cause | None:
    """All ranks together have the values of a parameter again, but in a different order."""
    pairs = list(zip(whole.trained, split.second.trained, strict=False))
    for together in zip(*(firsts(base.steps[done:], process.steps) for base, process in pairs), strict=False):
        due, own = ([pair[number].before for pair in together] for number in (0, 1))
        trainer = due[0].trainer
        if any(each.trainer != trainer for each in due):
            continue  # the stages of a pipeline have different parameters
        start = [next(step.before for step in base.steps if step.before.trainer == trainer) for base, _ in pairs]
        if len({len(each.weights) for each in (*start, *due, *own)}) > 1:
            continue
        for index, name in enumerate(due[0].names):
            if all(difference([start[0].weights[index]], [each.weights[index]]) <= CLOSE for each in start[1:]):
                continue  # the ranks have no parts, but began alike
            parts = zip(due, own, strict=True)
            apart = any(difference([one.weights[index]], [two.weights[index]]) > CLOSE for one, two in parts)
            first, before, now = (_norm(each, index) for each in (start, due, own))
            # The norm of normalized parameters is always the same.
            if apart and math.isclose(before, now, rel_tol=ROUNDED) and not math.isclose(first, now, rel_tol=ROUNDED):
                seen = f"{_called(name, due[0])} has the values of an uninterrupted run in a different order"
                fix = (
                    "Join the parts of the ranks in the order in which the program divides them. If rank r has the rows r, "
                    "r + n, r + 2n, ..., use torch.stack(parts, dim=1).flatten(0, 1), not torch.cat(parts)."
                )
                return seen, fix, _saving(split.first), "joined"
    return None


def _norm(ranks: Sequence[StepBegun], index: int) -> float:
    """The norm of a parameter that the ranks have together."""
    return math.hypot(*((each.weights[index] or (0.0, []))[0] for each in ranks))


def _left_out(whole: Run, split: Split, done: int) -> Cause | None:
    """Some parameters have their first values again: no checkpoint has them, or they are not loaded."""
    start = _first_of_each(whole.trained[0].steps)
    later = _first_of_each(whole.trained[0].steps[done:])
    pairs = [(later[key], own) for key, own in _first_of_each(split.second.trained[0].steps).items() if key in later]
    for due, own in pairs:
        values = start[own.before.trainer].before.weights, due.before.weights, own.before.weights
        if own.before.sharded or len(set(map(len, values))) > 1:
            continue
        triples = enumerate(zip(*values, strict=True))
        lost = [
            index
            for index, (one, two, now) in triples
            if difference([now], [one]) == 0 and difference([now], [two]) > CLOSE
        ]
        if lost:
            names = [due.before.names[index] for index in lost]
            where, made = ("", "") if names[0] else (due.before.made, COPIED)  # a copy of the parameters of a model
            shown = listed(list(dict.fromkeys(_called(name, due.before) for name in names)))
            saved = [each for event in split.first.all(Saved) for each in event.tensors]
            kept = any(difference([due.before.weights[index]], [each]) < ROUNDED for index in lost for each in saved)
            seen = f"the second start begins with the first values of {shown}"
            if kept:
                fix = "The checkpoint has these parameters: load them with load_state_dict() on every rank."
                return f"{seen}, although a checkpoint has the trained ones", fix, where, made
            fix = "Save these parameters in the checkpoint too, and load them where the checkpoint is loaded."
            return f"{seen}: no checkpoint has the trained ones", fix, _saving(split.first), f"trains:{names[0]} saved"
    return None


def _swapped(whole: Run, split: Split, done: int) -> Cause | None:
    """The second start begins with the parameters that an evaluation before the save has used, such as averaged ones."""
    base, first = whole.trained[0].steps, split.first.trained[0]
    if not is_reproducible(base, first.steps):
        return None
    for due, own in firsts(base[done:], split.second.trained[0].steps):
        evaluated = [each for each in first.of(ModelEvaluated) if each.names == due.before.names]
        same = any(difference(each.weights, own.before.weights) <= CLOSE for each in evaluated)
        # The parameters of an earlier step, such as those of the best checkpoint, are trained ones.
        if same and all(difference(each.before.weights, own.before.weights) > CLOSE for each in base):
            seen = "the second start begins with the parameters that were evaluated, such as averaged ones, not the trained ones"
            fix = "Save when the trained parameters are in the model again; save the averaged ones under a key of their own."
            return seen, fix, _saving(split.first), "hook:back passed"
    return None


def _called(name: str, step: StepBegun) -> str:
    """What to call a parameter; one that no model has is of an optimizer."""
    return f"`{name}`" if name else f"the parameters of the optimizer at {step.made}"


def _saving(first: Run) -> str:
    """The line that saved the last file."""
    saved = [pair for process in first.processes for pair in process.timed(Saved)]
    saves = sorted((seconds, event.where) for seconds, event in saved if event.path)
    return saves[-1][1] if saves else ""


def _loaded(process: Process) -> float:
    """The time at which a process loaded a checkpoint, before its first step; 0 if it did not."""
    loads = [seconds for seconds, _ in process.timed(Loaded)]
    loads += [seconds for seconds, event in process.timed(CheckpointCalled) if event.name == "load"]
    return max((seconds for seconds in loads if seconds < process.steps[0].seconds), default=0.0)


def _iterated_early(whole: Run, second: Run, done: int) -> Cause | None:
    """The first batch comes from a loader whose workers have started before the checkpoint is loaded."""
    process, due = second.trained[0], whole.trained[0].steps[done]
    begin = process.steps[0]
    used = {each.forward.loader for each in begin.backwards if each.forward}
    for seconds, event in process.timed(LoaderStarted):
        if seconds < _loaded(process) and (event.loader, event.iteration) in used and begin.keys != due.keys:
            seen = "the iteration over the loader begins before the checkpoint is loaded"
            fix = "Call iter(loader) after the checkpoint is loaded: each worker gets a copy of the data set at that moment."
            return seen, fix, event.where, "here"
    return None


def _copied_later(whole: Run, second: Run) -> Cause | None:
    """A copy that never changes, such as the reference model of DPO, is made of the loaded model instead of the first one."""
    base, process = whole.trained[0], second.trained[0]
    updated = {each.model for each in base.of(ModelUpdated)}
    loaded = _loaded(process)
    for before, (seconds, now) in zip(base.of(ModelCopied), process.timed(ModelCopied), strict=False):
        same = 0 < loaded < seconds and (before.where, before.names) == (now.where, now.names)
        if same and before.model not in updated and difference(before.weights, now.weights) > CLOSE:
            seen = f"the second start copies {now.model} after it has loaded the checkpoint, so the copy has trained parameters"
            fix = (
                "Make the copy before the checkpoint is loaded, or save the state_dict() of the copy too, and load it."
            )
            return seen, fix, now.where, ""
    return None


def _second_model_lost(whole: Run, split: Split) -> Cause | None:
    """A model that is only called without gradients, such as the key encoder of MoCo, has its first parameters again."""
    base, second = whole.trained[0], split.second.trained[0]
    for seconds, now in second.timed(ModelEvaluated):
        seen = [each for each in base.of(ModelEvaluated) if (each.model, each.names) == (now.model, now.names)]
        first = (
            0 < _loaded(second) < seconds <= second.steps[0].seconds
            and seen
            and difference(seen[0].weights, now.weights) < ROUNDED
        )
        if first and difference(seen[0].weights, seen[-1].weights) > CLOSE:
            text = f"the second start calls {now.model} with its first parameters, although they change during the training"
            fix = (
                "Save the state_dict() of this model in the checkpoint too, and load it where the checkpoint is loaded."
            )
            return text, fix, "" if _kept(split.first, now) else _saving(split.first), "saved"
    return None


def _part_lost(split: Split) -> Cause | None:
    """Tensors of the trained model that no optimizer has, such as a key encoder or a queue, have their first values again."""
    first, second = split.first.trained[0], split.second.trained[0]
    start, (seconds, now) = first.first(OthersSeen), next(iter(second.timed(OthersSeen)), (0.0, None))
    saved = max((seconds for seconds, _ in first.timed(Saved)), default=math.inf)
    due = next((each for seconds, each in first.timed(OthersSeen) if seconds > saved), None)  # in the next step
    if not (start and due and now and start.names == due.names == now.names and 0 < _loaded(second) < seconds):
        return None
    lost = [
        name
        for name, begun, last, again in zip(now.names, start.values, due.values, now.values, strict=True)
        if difference([begun], [again]) == 0 and difference([begun], [last]) > CLOSE
    ]
    if not lost:
        return None
    parts = listed([f"`{name}`" for name in lost])
    seen = f"the second start begins with the first values of {parts}, which change during the training"
    fix = "Save the state_dict() of the whole model, and load it where the checkpoint is loaded."
    return seen, fix, _saving(split.first), f"trains:{lost[0]} saved"


def _saved_by_some(first: Run) -> Cause | None:
    """Only some ranks call save_state() of the Accelerator, which saves the random states of the ranks that call it."""
    calls = [[each for each in process.of(AcceleratorCalled) if each.name == "save_state"] for process in first.trained]
    saving = [(process, each[0]) for process, each in zip(first.trained, calls, strict=True) if each]
    if 0 < len(saving) < len(calls):
        process, event = saving[0]
        seen = f"only {named(process)} calls save_state(), so the random states of the others are not saved"
        fix = "Call accelerator.save_state() on every rank: move it out of `if accelerator.is_main_process`."
        return seen, fix, event.where, ""
    return None


def frozen_changed(whole: Run, split: Split) -> Cause | None:
    """A model that never changes, such as the reference of a policy, has other parameters after the second start."""
    done = len(split.first.trained[0].steps)
    kept = {
        (each.model, *each.names) for each in _frozen(whole.trained[0], done // 2)
    }  # they are recorded ever less often
    second = split.second.trained[0]
    seen = [event for seconds, event in second.timed(ModelEvaluated) if seconds > _loaded(second)]
    for event in _frozen(split.first.trained[0], 0):
        own = [each for each in seen if (each.model, each.names) == (event.model, event.names)]
        known = (event.model, *event.names) in kept and _loaded(second) > 0 and any(each.steps for each in own)
        if known and not any(difference(each.weights, event.weights) <= CLOSE for each in own):
            text = (
                f"a {event.model} that never changes in the first start has different parameters after the second start"
            )
            fix = "Save its state_dict() in the checkpoint and load that, or load it from the file from which it came at first."
            return text, fix, "", f"{FROZEN} restored"
    return None


def _frozen(process: Process, done: int) -> Iterator[ModelEvaluated]:
    """Yield the models with the same parameters in the first evaluation, which may follow other steps, and after ``done``."""
    events = process.of(ModelEvaluated)
    for event in (each for each in events if each.steps == events[0].steps):
        later = [
            each
            for each in events
            if each.steps > max(done, event.steps) and (each.model, each.names) == (event.model, event.names)
        ]
        if any(difference(each.weights, event.weights) == 0 for each in later):
            yield event


def copy_lost(whole: Run, split: Split, done: int) -> Cause | None:
    """The second start evaluates a model with other parameters than the uninterrupted run, after the same step."""
    second = split.second
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
            if not _kept(split.first, each):
                return seen, fix, _saving(split.first), "call:register_for_checkpointing saved"
            return seen, fix, "", f"anew {COPIES} loading:model restored"
    return None


def _kept(first: Run, model: ModelEvaluated) -> bool:
    """Whether a file has a parameter of a model as it was when it was evaluated last, or a copy of a model of its class."""
    own = [
        each for each in first.trained[0].of(ModelEvaluated) if (each.model, each.names) == (model.model, model.names)
    ]
    files = list(first.all(Saved))
    tensors = [each for event in files for each in event.tensors]
    same = (difference([one], [other]) < ROUNDED for each in own[-1:] for one in each.weights for other in tensors)
    return any(model.model in event.copies for event in files) or any(same)


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
    if load and without and (all(process.steps[0].before.state == 0 for process in without) or _parts(second)):
        seen = f"{named(without[0])} does not load the optimizer state"
        return seen, "Call load_state_dict() of the optimizer on every rank.", load.where, "rank-gate"
    return None


def only_some_load(second: Run) -> str:
    """That only some of the ranks load a checkpoint in a line, if this is so."""
    loads = [{event.where for event in each.of(Loaded) if event.path} for each in second.trained]
    of_some = set[str]().union(*loads).difference(set[str]().union(*loads).intersection(*loads))
    loading = [named(each) for each, lines in zip(second.trained, loads, strict=True) if lines & of_some]
    if len(loading) in (0, len(second.trained)):
        return ""
    return f"only {listed(loading)} {'loads' if len(loading) == 1 else 'load'} a checkpoint"


def _parts(second: Run) -> bool:
    """Whether the ranks begin with the same parameters and gradients, and have different parameters after the first step."""
    first, *others = (process.steps[0] for process in second.trained)
    alike = all(difference(first.before.weights, each.before.weights) <= CLOSE for each in others)
    alike = alike and all(difference(first.before.gradients, each.before.gradients) <= CLOSE for each in others)
    after = [each.after.weights for each in (first, *others) if each.after]
    return alike and any(difference(after[0], each) > CLOSE for each in after[1:])


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


def best_lost(whole: Run, split: Split) -> Cause | None:
    """The best value so far, or a count of epochs without a better one, has its first value again."""
    cause = _begun_again(whole, split, len(split.first.trained[0].steps), BEST)
    return (f"after the second start {cause[0]}", *cause[1:]) if cause else None


def _begun_again(whole: Run, split: Split, done: int, names: re.Pattern[str] = ANY) -> Cause | None:
    """Variables with such names that change in an uninterrupted run have their first values again."""
    base, first, second = (run.trained[0] for run in (whole, split.first, split.second))
    start, due = (variables(base, base.steps[number : number + 1]) for number in (0, done))
    last, same = (variables(process, process.steps[done - 1 : done]) for process in (base, first))
    begun = variables(second, second.steps[:1])
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
        lost = [name for name in lost if not (what and _counted_elsewhere(name, initial, expected, now))]
        lost = [name for name in lost if isinstance(now[name], int)] or lost  # others are often computed from them
        lost = [name for name in lost if not _within(name)] or lost
        if lost and what:
            shown = listed([f"`{name}` {what} {now[name]:g} instead of {expected[name]:g}" for name in lost[:3]])
            fix = f"Save {listed(lost[:3])} in the checkpoint, and assign it where the checkpoint is loaded."
            part = lost[0].rpartition(".")[2]
            return shown, fix, "", f"unpersistent:{part} filled restored unread:{lost[0]}"
        if lost:
            seen = f"the generator `{lost[0]}` begins again with its first state"
            fix = "Save the state of the generator (get_state()) of each rank, or seed it with a function of the step."
            return seen, fix, "", f"made:{lost[0]}"
    return None


def _counted_elsewhere(name: str, initial: dict[str, float], expected: dict[str, float], now: dict[str, float]) -> bool:
    """Whether a variable that is restored had the same values: this one counts, for example, the steps since the start."""
    common = now.keys() & expected.keys() & initial.keys()  # a variable may have a number only after a second start
    twins = [
        each for each in common if now[each] == expected[each] == expected[name] and initial[each] == initial[name]
    ]
    return expected[name] > FEW and bool(twins)


def _held_lost(whole: Run, split: Split) -> Cause | None:
    """Before the first forward pass, an attribute that changes from step to step, such as a running mean, is as at first."""
    base, first, second = (run.trained[0] for run in (whole, split.first, split.second))
    done = len(first.steps)
    opened = base.first(VariablesSeen)
    again = next((event for seconds, event in second.timed(VariablesSeen) if seconds > _loaded(second)), None)
    due = variables(base, base.steps[done : done + 1])  # a sum of an epoch is 0 there in every run
    last, same = (variables(process, process.steps[done - 1 : done]) for process in (base, first))
    following = variables(second, second.steps[:1])
    if not (opened and again and last and same):
        return None
    for name in _in_order(again.numbers, opened.numbers.keys() & last.numbers.keys() & same.numbers.keys()):
        initial, now, before = opened.numbers[name], again.numbers[name], last.numbers[name]
        expected, then = (each.numbers.get(name) if each else None for each in (due, following))
        as_due = expected == now
        if expected is not None and then is not None and abs(then - expected) < abs(expected - initial) / 2:
            continue  # each step computes it anew, as a sum of gradients
        if _within(name) and now == initial != before == same.numbers[name] and not as_due:
            seen = f"`{name}` begins again with {now:g}, but it was {before:g} before the last step of the first start"
            part = name.rpartition(".")[2]
            return seen, HELD, _saving(split.first), f"stateful:{part} member:{part} saved"
    return None


def _within(name: str) -> bool:
    """Whether a name is that of an attribute of a variable."""
    return "." in name.removeprefix("self.")


def _in_order(now: dict[str, float], common: Set[str]) -> list[str]:
    """The common names, in the order of one of the dictionaries."""
    return [name for name in now if name in common]


def variables(process: Process, steps: Sequence[Step]) -> VariablesSeen | None:
    """The variables before a step, the first of these."""
    seen: VariablesSeen | None = None
    for _, event in process.events if steps else ():
        if isinstance(event, VariablesSeen):
            seen = event
        elif isinstance(event, StepBegun) and event is steps[0].before:
            return seen
    return None


def saved_too_often(whole: Run, second: Run, done: int) -> str:
    """A file that the second start saves after a step after which an uninterrupted run does not save it."""
    usual = _saves(whole, 0)
    extra = sorted(_saves(second, done) - usual)
    known = {name for _, name in usual}
    return next((f"{name} is saved after step {number}" for number, name in extra if name in known), "")


def _saves(run: Run, done: int) -> set[tuple[int, str]]:
    """The files that a run saves, each with the number of steps before; ``done`` are those of an earlier run."""
    return {
        (done + sum(step.seconds <= seconds for step in process.steps), event.path.rsplit("/", 1)[-1])
        for process in run.processes
        for seconds, event in process.timed(Saved)
        if event.path and process.steps
    }
