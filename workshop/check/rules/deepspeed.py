"""Training with DeepSpeed's engine: it does the work, ZeRO partitions the optimizer, and the training is that of plain DDP."""

from functools import partial

from workshop.check.evidence.engine import EngineCheckpoint, PlainWeights
from workshop.check.evidence.events import (
    Backward,
    EngineCalled,
    EngineLoss,
    EngineMade,
    MomentsMeasured,
    Raised,
    Reported,
    Saved,
    StepBegun,
    Wrapped,
)
from workshop.check.evidence.run import Run
from workshop.check.rules.checkpoints import export_differs, not_exported, not_saved
from workshop.check.rules.ending import crash, ending
from workshop.check.rules.learning import no_learning
from workshop.check.rules.restart import epoch_repeated, epoch_skipped, never_resumes, resume_differs, resume_fails
from workshop.check.rules.rule import Rule, Said, Seen, rule
from workshop.check.rules.words import listed, plural
from workshop.check.scenarios import ENGINE_CHECKPOINT, ENGINE_SPLIT, PLAIN_WEIGHTS, REFERENCE, UNEVEN, WHOLE, Split

SAME = 1e-4  # nats: how far a different order of sums may move a loss


# ---------------------------------------------------------------- the engine and its configuration


@rule(
    why="ZeRO neither averages nor partitions what does not go through the engine.",
    fix="Create the engine with deepspeed.initialize(model=..., optimizer=..., config=...), and call engine(inputs), "
    "engine.backward(loss) and engine.step().",
    runs=WHOLE,
    needs=(EngineMade, EngineCalled, Wrapped, StepBegun),
    blocks=True,
)
def engine_idle(run: Run) -> Said:
    """There is no engine, or the program calls backward() and step() of something else."""
    if not run.trained:
        return
    if not any(process.first(EngineMade) for process in run.trained):
        wrapped = next(run.all(Wrapped), None)
        seen = "no engine is created: DDP averages the gradients, and every rank holds the whole optimizer state"
        yield Seen(seen, wrapped.where if wrapped else "")
        return
    for process in run.trained:
        calls = {event.name for event in process.of(EngineCalled)}
        for name, instead in (("backward", "loss.backward()"), ("step", "optimizer.step()")):
            if name not in calls:
                seen = f"the engine's {name}() is never called; {instead} is called instead"
                yield Seen(seen, process.steps[0].before.where)
                return


@engine_idle.also(WHOLE, needs=(EngineCalled, Raised), instead_of=(crash,))
def engine_without_step(run: Run) -> Said:
    """The engine's second backward() failed because its step() was not called: DeepSpeed 0.18 raises a TypeError there."""
    found = run.first_exception()
    for process in run.ranks:
        calls = process.of(EngineCalled)
        names = [event.name for event in calls]
        if found and names == ["backward", "backward"] and calls[-1].where == found[1].where:
            seen = "the engine's backward() is called a second time, but its step() never"
            yield Seen(seen, found[1].where, found[1].traceback)
            return


@rule(
    why="DeepSpeed computes the number of batches to accumulate from the batch sizes in its configuration.",
    fix="Set train_micro_batch_size_per_gpu to the batch size of the DataLoader.",
    runs=WHOLE,
    needs=(EngineMade, Backward, StepBegun),
    after=(engine_idle,),
)
def batch_differs(run: Run) -> Said:
    """The configuration has a different batch size than the loader."""
    made = _engine(run)
    backwards = (backward for process in run.trained for step in process.steps for backward in step.backwards)
    sizes = {len(backward.forward.rows) for backward in backwards if backward.forward}
    if made and sizes and made.batch not in sizes:
        given = ", ".join(map(str, sorted(sizes)))
        yield Seen(f"the engine is configured for batches of {made.batch}, and gets {given} samples", made.where)


@rule(
    why="The engine already averages over the processes and over the accumulated batches, so the gradient is divided twice.",
    fix="Pass the loss of the batch to engine.backward() as it is.",
    runs=WHOLE,
    needs=(EngineLoss, Reported),
    after=(engine_idle,),
)
def scaled_twice(run: Run) -> Said:
    """The losses that the engine gets are not those that the program reports."""
    given = [process.of(EngineLoss) for process in run.trained]
    for number, (loss, events) in enumerate(zip(reported(run), zip(*given, strict=False), strict=False), 1):
        mean = sum(event.loss for event in events) / len(events)
        if abs(mean - loss) > 1e-3 * max(abs(loss), 1e-3):
            yield Seen(
                f"in step {number} the engine's backward() gets losses of {mean:.4f} on average, and {loss:.4f} is reported",
                events[0].where,
            )
            return


@rule(
    why="AdamW's moments take twice the bytes of the parameters, on every rank. ZeRO-1 partitions them.",
    fix='Set "zero_optimization": {"stage": 1} (or a higher stage) in DeepSpeed\'s configuration.',
    runs=WHOLE,
    needs=(MomentsMeasured, EngineMade),
    after=(engine_idle,),
)
def optimizer_whole(run: Run) -> Said:
    """Each rank holds all of the optimizer's moments, or most of them."""
    made = _engine(run)
    for process in run.trained:
        for event in process.of(MomentsMeasured)[-1:]:
            if made and event.own > event.whole * (0.5 / run.nproc + 0.5):
                share = event.own / event.whole
                seen = f"each of {run.nproc} ranks holds {share:.0%} of AdamW's moments: the ZeRO stage is {made.stage}"
                yield Seen(seen, made.where)
                return


@rule(
    why="How the work is divided over the ranks should not change what is computed.",
    fix='Set "gradient_clipping": 0.0 in DeepSpeed\'s configuration (its default is 1.0) and '
    '"gradient_accumulation_steps" to 1, so that a step is that of stage 02.',
    runs=(WHOLE, REFERENCE),
    needs=(Reported, EngineMade),
    last=True,
)
def differs_from_ddp(run: Run, reference: Run) -> Said:
    """The losses are not those of the same training without the engine."""
    for number, (one, other) in enumerate(zip(reported(run), reported(reference), strict=False), 1):
        if not abs(one - other) < SAME:
            made = _engine(run)
            clips = f"; the norm of the gradients is clipped at {made.clipping:g}" if made and made.clipping else ""
            seen = f"the loss of step {number} is {one:.4f}, and {other:.4f} with the solution of stage 02{clips}"
            yield Seen(seen, made.where if made else "")
            return


@no_learning.also((WHOLE, REFERENCE), needs=(Reported,), last=True)
def no_losses(run: Run, reference: Run) -> Said:
    """There are no losses to compare."""
    if reported(reference) and not reported(run):
        yield Seen("no losses are reported: the program never calls log.write()")


def reported(run: Run) -> list[float]:
    """The losses of the steps, as rank 0 has reported them."""
    return [loss for event in run.all(Reported) for loss in event.losses]


def _engine(run: Run) -> EngineMade | None:
    return next((event for process in run.trained[:1] for event in process.of(EngineMade)), None)


# ---------------------------------------------------------------- saved and resumed


@not_saved.also((WHOLE, ENGINE_CHECKPOINT), needs=(EngineCalled, EngineMade, Saved), active=True)
def engine_not_saved(run: Run, checkpoint: EngineCheckpoint) -> Said:
    """Not every rank's part of the engine's checkpoint is there."""
    calls = [event for process in run.trained for event in process.of(EngineCalled) if event.name == "save_checkpoint"]
    if not calls:
        other = next(run.all(Saved), None)
        yield Seen("the engine saves no checkpoint", other.where if other else "")
        return
    made = _engine(run)
    partitioned = made is not None and made.stage > 0  # otherwise rank 0 saves everything
    if not checkpoint.named or (partitioned and checkpoint.parts < run.nproc):
        files = ", ".join(checkpoint.files or ()) or "nothing"
        seen = f"the checkpoint does not contain the part of every rank when the run has ended (it has left: {files})"
        yield Seen(seen, calls[0].where)


def _if_first(asked: Rule, whole: Run, split: Split) -> Said:
    """What is wrong first with the second start, if it is of this rule."""
    found = _first_problem(whole, split)
    if found and found[0] is asked:
        yield found[1]


for _rule in (resume_fails, never_resumes, epoch_repeated, epoch_skipped, resume_differs):
    _rule.also((WHOLE, ENGINE_SPLIT), needs=(EngineCalled, StepBegun, Reported), active=True)(partial(_if_first, _rule))


def _first_problem(whole: Run, split: Split) -> tuple[Rule, Seen] | None:
    """What is wrong first with a second start from the engine's checkpoint."""
    second = split.second
    calls = (event for process in second.trained for event in process.of(EngineCalled))
    load = next((event.where for event in calls if event.name == "load_checkpoint"), "")
    if ended := ending(second):
        return resume_fails, Seen(f"the second start fails: {ended.text}", ended.where, ended.detail)
    total, done, rest = (len(run.trained[0].steps) if run.trained else 0 for run in (whole, split.first, second))
    if rest >= total:
        seen = Seen(f"the second start takes all {plural(rest, 'step')} again", load)
        return (epoch_repeated if load else never_resumes), seen
    if done + rest != total:
        seen = Seen(f"{done} + {rest} steps in two parts, {total} in one", load)
        return (epoch_repeated if done + rest > total else epoch_skipped), seen
    pairs = zip(reported(whole)[done:], reported(second), strict=False)
    for number, (one, other) in enumerate(pairs, done + 1):
        if not abs(one - other) < SAME:
            text = f"after the second start the loss of step {number} is {other:.4f}, and {one:.4f} without a restart"
            return resume_differs, Seen(text, load)
    return None


# ---------------------------------------------------------------- exported and evaluated


@not_exported.also((ENGINE_SPLIT, PLAIN_WEIGHTS), after=(resume_fails,), active=True)
def plain_weights_missing(split: Split, weights: PlainWeights) -> Said:
    """There is no file of parameters that plain PyTorch loads."""
    if not weights.found:
        yield Seen("--export leaves no file")
    elif weights.error:
        yield Seen(f"a plain SmallCNN cannot load it: {weights.error}")


@export_differs.also((ENGINE_SPLIT, PLAIN_WEIGHTS), after=(not_exported,), last=True)
def plain_weights_differ(split: Split, weights: PlainWeights) -> Said:
    """The exported parameters are not those of the same training without the engine."""
    if weights.different:
        names = listed(weights.different)
        yield Seen(f"the exported parameters are not those that the solution of stage 02 ends with ({names})")


@rule(
    why="With ZeRO-3 every forward pass gathers the parameters from all ranks: a rank that runs one more waits for ever.",
    fix="Give all ranks the same number of test samples: repeat one where a rank has fewer, and do not count its result.",
    runs=UNEVEN,
)
def evaluation_uneven(run: Run) -> Said:
    """An evaluation does not end where the ranks have different numbers of batches."""
    if ended := ending(run):
        lead = f"with ZeRO-3, and {run.nproc} ranks with different numbers of test samples"
        yield Seen(f"{lead}: {ended.text}", ended.where, ended.detail)
