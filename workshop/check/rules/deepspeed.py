"""Training with DeepSpeed: its engine takes the steps, ZeRO partitions the optimizer state, the losses equal those of DDP."""

from collections.abc import Sequence
from itertools import islice
from pathlib import PurePath

from workshop.check.evidence.engine import EngineCheckpoint, PlainWeights
from workshop.check.evidence.events import (
    EngineCalled,
    EngineLoss,
    EngineMade,
    MomentsMeasured,
    Reported,
    Saved,
    Wrapped,
)
from workshop.check.evidence.misuses import SavedEmpty
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.rules.checkpoints import export_differs, not_exported, not_saved
from workshop.check.rules.ending import ending, no_training
from workshop.check.rules.learning import no_learning
from workshop.check.rules.restart import epoch_repeated, epoch_skipped, never_resumes, resume_differs, resume_fails
from workshop.check.rules.rule import Said, Seen, Told, also, rule
from workshop.check.rules.schedules import schedule_length
from workshop.check.rules.sharding import losses, unequal
from workshop.check.rules.words import listed
from workshop.check.scenarios import ENGINE_CHECKPOINT, ENGINE_SPLIT, PLAIN_WEIGHTS, REFERENCE, UNEVEN, WHOLE, Split

SAME = 1e-4  # nats: how much a different order of summation may change a loss
INSTEAD = {"backward": "loss.backward()", "step": "optimizer.step()"}


@rule(
    why="DeepSpeed averages gradients and shards the optimizer state only if you train through its engine.",
    fix="Call deepspeed.initialize(model=, optimizer=, config=), then engine(inputs), engine.backward(loss), engine.step().",
    blocks=True,
    origin="call:backward",
)
def engine_idle(run: Run) -> Said:
    """There is no engine, or the program does not call its backward() and step()."""
    missing = [(process, name) for process in run.trained for name in INSTEAD if _line_of([process], name) is None]
    if run.trained and not any(run.all(EngineMade)):
        yield Seen("no engine is created: every rank holds the whole optimizer state", run.where(Wrapped))
    elif missing:
        process, name = missing[0]
        yield Seen(f"engine.{name}() is never called; the program calls {INSTEAD[name]} instead", process.step_where)


def _line_of(processes: Sequence[Process], method: str) -> str | None:
    """The line that calls a method of the engine."""
    calls = (event for process in processes for event in process.of(EngineCalled))
    return next((event.where for event in calls if event.name == method), None)


@rule(
    why="The engine counts the batches in step(), and updates the parameters itself after gradient_accumulation_steps of them.",
    fix="Call engine.step() after every engine.backward(), without a condition of your own.",
    after=(engine_idle,),
    instead_of=(no_training, schedule_length),
    needs=(EngineCalled,),
    anywhere=True,
)
def engine_steps_missing(run: Run) -> Said:
    """step() is called for some of the batches only."""
    for process in [] if run.failed else run.processes:
        calls = {name: [each for each in process.of(EngineCalled) if each.name == name] for name in INSTEAD}
        # With two losses before a step that updates the parameters, as in a GAN, nothing is missing. Pipelines step themselves.
        updates = len(process.steps) >= (len(calls["step"]) - 1 if calls["step"] else 1)
        if len(calls["backward"]) > len(calls["step"]) + 1 and not updates:
            counts = f"{len(calls['step'])} of {len(calls['backward'])}"
            where = (calls["step"] or calls["backward"])[0].where
            origin = "" if calls["step"] else "condition:step"
            yield Seen(f"engine.step() follows only {counts} calls of engine.backward()", where, origin=origin)
            return


@rule(
    why="Each rank saves its shard of the optimizer state into the folder of its own tag, so no folder has all shards.",
    fix="Build the tag for save_checkpoint() only from values that are the same on all ranks, such as the number of the step.",
    needs=(EngineCalled,),
    anywhere=True,
)
def tags_differ(run: Run) -> Said:
    """The ranks save a checkpoint of the engine with different tags."""
    saves = [[each for each in process.of(EngineCalled) if each.name == "save_checkpoint"] for process in run.ranks]
    for together in zip(*saves, strict=False):
        tags = sorted({each.tag for each in together})
        if len(tags) > 1:
            seen = f"the ranks save one checkpoint with the tags {' and '.join(tags)}"
            yield Seen(seen, together[0].where, origin="tag")
            return


@rule(
    why="DeepSpeed computes the number of batches to accumulate from the batch sizes in its configuration.",
    fix="In DeepSpeed's configuration, set train_micro_batch_size_per_gpu to the batch size of the DataLoader.",
    after=(engine_idle,),
    origin="configured",
)
def batch_differs(run: Run) -> Said:
    """The configuration has a different batch size than the loader."""
    backwards = (backward for process in run.trained for step in process.steps for backward in step.backwards)
    sizes = {len(backward.forward.rows) for backward in backwards if backward.forward}
    made = next(run.all(EngineMade), None)
    if made and sizes and made.batch not in sizes:
        given = ", ".join(map(str, sorted(sizes)))
        yield Seen(f"the engine is configured for batches of {made.batch} samples, but gets {given}", made.where)


@rule(
    why="The engine averages over the processes and the accumulated batches. If you divide too, the gradient is too small.",
    fix="Pass the loss of the batch to engine.backward() without dividing it.",
    needs=(Reported,),
    after=(engine_idle,),
)
def scaled_twice(run: Run) -> Said:
    """The engine gets different losses than the program reports."""
    given = [process.of(EngineLoss) for process in run.trained]
    for number, (loss, events) in enumerate(zip(losses(run, Reported), zip(*given, strict=False), strict=False), 1):
        mean = sum(event.loss for event in events) / len(events)
        if abs(mean - loss) > 1e-3 * max(abs(loss), 1e-3):
            seen = f"in step {number} engine.backward() gets a mean loss of {mean:.4f}, but the reported loss is {loss:.4f}"
            yield Seen(seen, events[0].where)
            return


@rule(
    why="AdamW's moments need twice the memory of the parameters on every rank; ZeRO stage 1 shards them.",
    fix='In DeepSpeed\'s configuration, set "zero_optimization": {"stage": 1}, or a higher stage.',
    after=(engine_idle,),
    origin="configured",
)
def optimizer_whole(run: Run) -> Said:
    """Each rank holds all moments of the optimizer, or most of them."""
    made = next(run.all(EngineMade), None)
    measured = [event for process in run.trained for event in process.of(MomentsMeasured)[-1:]]
    whole = [event for event in measured if event.own > event.whole * (0.5 / run.nproc + 0.5)]
    if made and whole:
        share = whole[0].own / whole[0].whole
        yield Seen(f"each rank holds {share:.0%} of AdamW's moments: the ZeRO stage is {made.stage}", made.where)


@rule(
    why="DeepSpeed divides the work differently, but should compute the same training as DDP.",
    fix='In DeepSpeed\'s configuration, set "gradient_clipping" to 0.0 (default: 1.0) and "gradient_accumulation_steps" to 1.',
    runs=(WHOLE, REFERENCE),
    needs=(Reported,),
    last=True,
    origin="configured",
)
def differs_from_ddp(run: Run, reference: Run) -> Said:
    """The losses are not those of the same training without the engine."""
    made = next(run.all(EngineMade), None)
    clips = f"; the norm of the gradients is clipped at {made.clipping:g}" if made and made.clipping else ""
    if seen := unequal(losses(run, Reported), losses(reference, Reported), SAME):
        yield Seen(f"{seen} without the engine{clips}", run.where(EngineMade))


@no_learning.also((WHOLE, REFERENCE), needs=(Reported,), last=True)
def no_losses(run: Run, reference: Run) -> Said:
    """There are no losses to compare."""
    if losses(reference, Reported) and not losses(run, Reported):
        yield Seen("no losses are reported: the program never calls log.write()")


@not_saved.also((WHOLE, ENGINE_CHECKPOINT), active=True)
def engine_not_saved(run: Run, checkpoint: EngineCheckpoint) -> Said:
    """The checkpoint of the engine lacks the part of a rank."""
    saved = _line_of(run.trained, "save_checkpoint")
    made = next(run.all(EngineMade), None)
    parts = run.nproc if made and made.stage else 0  # without ZeRO rank 0 saves everything
    if saved is None:
        yield Seen("the engine saves no checkpoint", run.where(Saved))
    elif not checkpoint.named or checkpoint.parts < parts:
        files = ", ".join(checkpoint.files or ()) or "nothing"
        yield Seen(f"the checkpoint lacks the parts of some ranks; it contains: {files}", saved)


RESUMING = (resume_fails, never_resumes, epoch_repeated, epoch_skipped, resume_differs)


@also(*RESUMING, runs=(WHOLE, ENGINE_SPLIT), needs=(Reported,), active=True)
def engine_second_start(whole: Run, split: Split) -> Told:
    """The first problem of a second start from the checkpoint of the engine."""
    second = split.second
    load = _line_of(second.trained, "load_checkpoint") or ""
    if ended := ending(second):
        return [(resume_fails, Seen(f"the second start fails: {ended.text}", ended.where, ended.detail))]
    total, done, rest = (len(run.trained[0].steps) if run.trained else 0 for run in (whole, split.first, second))
    if rest >= total:
        about = epoch_repeated if load else never_resumes
        return [(about, Seen(f"the second start repeats all {rest} steps", load))]
    if done + rest != total:
        counts = Seen(f"{done} + {rest} steps in two starts, but {total} in one", load)
        return [(epoch_repeated if done + rest > total else epoch_skipped, counts)]
    seen = unequal(losses(second, Reported), losses(whole, Reported)[done:], SAME, first=done + 1)
    return [(resume_differs, Seen(f"after the second start {seen} without a restart", load))] if seen else []


@rule(
    why="With ZeRO stage 3, and with FSDP, a process has only its part of each parameter. The file lacks the rest, so nobody can "
    "load the trained model from it.",
    fix="On all ranks, call engine.save_16bit_model(folder) with DeepSpeed; with FSDP, call get_model_state_dict() with "
    "full_state_dict=True.",
    needs=(SavedEmpty,),
    anywhere=True,
)
def saved_without_values(run: Run) -> Said:
    """A file contains parameters without values."""
    for event in islice(run.all(SavedEmpty), 1):
        file, names = PurePath(event.path).name or "a file", listed(event.names)
        yield Seen(f"{file} has {len(event.names)} of {event.of} parameters without values ({names})", event.where)


@not_exported.also((ENGINE_SPLIT, PLAIN_WEIGHTS), after=(resume_fails,), active=True)
def plain_weights_missing(split: Split, weights: PlainWeights) -> Said:
    """There is no file of parameters that plain PyTorch can load."""
    if not weights.found:
        yield Seen("--export writes no file")
    elif weights.error:
        yield Seen(f"a plain SmallCNN cannot load the exported file: {weights.error}")


@export_differs.also((ENGINE_SPLIT, PLAIN_WEIGHTS), after=(not_exported,), last=True)
def plain_weights_differ(split: Split, weights: PlainWeights) -> Said:
    """The exported parameters are not those of the same training without the engine."""
    if weights.different:
        yield Seen(f"the solution of stage 02 ends with different parameters ({listed(weights.different)})")


@rule(
    why="With ZeRO-3 every forward pass gathers the parameters from all ranks: a rank with one more batch waits forever.",
    fix="Give all ranks the same number of test samples: repeat some, as DistributedSampler does, and do not count these twice.",
    runs=UNEVEN,
)
def evaluation_uneven(run: Run) -> Said:
    """An evaluation hangs or fails if the ranks have different numbers of batches."""
    if ended := ending(run):
        yield Seen(f"with ZeRO-3 and different numbers of test samples: {ended.text}", ended.where, ended.detail)
