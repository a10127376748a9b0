"""Checkpoints of sharded models: saved by all ranks while training continues, resumed on any number of ranks, and exported."""

from functools import partial

from workshop.check.evidence.events import CheckpointCalled, FineTuningReported, Saved
from workshop.check.evidence.process import Step
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import difference
from workshop.check.evidence.text import Checkpoint, Exported, Restarted
from workshop.check.rules.ending import ending
from workshop.check.rules.restart import never_resumes, optimizer_lost, resume_differs, resume_fails, schedule_lost
from workshop.check.rules.rule import Makes, Said, Seen, Told, also, findings, rule
from workshop.check.rules.sharding import CLOSE, losses, unequal
from workshop.check.rules.words import plural
from workshop.check.scenarios import CHECKPOINT, EXPORTED, RESTARTED, WHOLE

SAVES = (CheckpointCalled,)
_of_checkpoint: "partial[Makes[[Run, Checkpoint]]]" = partial(rule, runs=(WHOLE, CHECKPOINT), needs=SAVES)


def _saves(run: Run) -> list[CheckpointCalled]:
    """The calls that save a checkpoint of all ranks (without those that pass a storage writer, such as an export)."""
    return [event for event in run.all(CheckpointCalled) if event.name in ("save", "async_save") and not event.writer]


@_of_checkpoint(
    why="A rank that gathers the whole state can run out of memory, and the other ranks wait while it writes.",
    fix="Call torch.distributed.checkpoint.async_save on every rank with get_state_dict(): each rank then writes its own shard.",
)
def whole_saved(run: Run, checkpoint: Checkpoint) -> Said:
    """One file holds the state, or one rank writes all of it."""
    saves, saved = _saves(run), next(run.all(Saved), None)
    if saved and not saves:
        yield Seen("one rank saves the whole state to one file", saved.where)
    elif saves and checkpoint.complete and checkpoint.writers < run.nproc:
        yield Seen(f"only {checkpoint.writers} of {run.nproc} ranks wrote files of the checkpoint", saves[0].where)


@_of_checkpoint(
    why="After a crash there is nothing to resume from.",
    fix="On every rank, call torch.distributed.checkpoint.async_save and wait for it, or engine.save_checkpoint() of DeepSpeed.",
    blocks=True,
)
def not_saved(run: Run, checkpoint: Checkpoint) -> Said:
    """There is no complete checkpoint with parameters."""
    saves = _saves(run)
    if not saves and not any(run.all(Saved)):
        yield Seen("no checkpoint is saved")
    elif saves and not checkpoint.complete:
        yield Seen("the run ends without a complete checkpoint", saves[0].where)
    elif saves and not checkpoint.has("embed_tokens"):
        yield Seen("the checkpoint contains no parameters of the model", saves[0].where)


@optimizer_lost.also((WHOLE, CHECKPOINT), needs=SAVES, after=(not_saved,))
def optimizer_not_saved(run: Run, checkpoint: Checkpoint) -> Said:
    """The checkpoint has no moments of AdamW."""
    saves = _saves(run)
    if saves and checkpoint.complete and not checkpoint.has("exp_avg"):
        yield Seen("the checkpoint does not contain the optimizer state", saves[0].where)


@_of_checkpoint(
    why="All GPUs are idle while the files are written. For a large model this can take minutes per checkpoint.",
    fix="Call torch.distributed.checkpoint.async_save with a gloo group (dist.new_group); wait for it before the next save.",
    after=(not_saved, whole_saved),
)
def saves_waiting(run: Run, checkpoint: Checkpoint) -> Said:
    """No checkpoint is saved asynchronously."""
    saves = _saves(run)
    if saves and checkpoint.has("exp_avg") and all(event.name != "async_save" for event in saves):
        yield Seen("training stops while a checkpoint is written: async_save is never called", saves[0].where)


@rule(
    why="After the restart the model trains on some samples twice, and never on others.",
    fix="Skip the batches of the finished steps: islice(batches, steps_done, None).",
    runs=(WHOLE, RESTARTED),
    needs=SAVES,
)
def data_repeated(whole: Run, restarted: Restarted) -> Said:
    """After a restart the steps get different samples than in an uninterrupted run."""
    return findings(data_repeated, first_problem, whole, restarted)


@also(resume_fails, never_resumes, resume_differs, schedule_lost, optimizer_lost, runs=(WHOLE, RESTARTED), needs=SAVES)
def first_problem(whole: Run, restarted: Restarted) -> Told:
    """The first difference between the restarted run and the uninterrupted one."""
    again = restarted.again
    if ended := ending(again):
        return [(resume_fails, Seen(f"after the restart: {ended.text}", ended.where, ended.detail))]
    if not again.trained:
        return [(resume_fails, Seen("after the restart the run takes no step"))]
    base, steps = whole.trained[0].steps, again.trained[0].steps
    if len(steps) < len(base):
        return _first_difference(base, steps)
    where = next((event.where for event in again.trained[0].of(CheckpointCalled) if event.name == "load"), "")
    return [(never_resumes, Seen(f"after the restart the run repeats all {len(steps)} steps", where))]


def _first_difference(base: list[Step], again: list[Step]) -> Told:
    """The first difference between the steps after the restart and the same steps of the uninterrupted run."""
    number = len(base) - len(again) + 1
    pairs = list(zip(base[number - 1 :], again, strict=True))
    one, other = pairs[0]
    where = other.before.where
    if difference(one.before.weights, other.before.weights) > 1e-6:
        return [(resume_differs, Seen(f"before step {number} the parameters are not the saved ones", where))]
    if one.keys != other.keys:
        return [(data_repeated, Seen(f"step {number} gets different samples than without the restart", where))]
    for index, (step, resumed) in enumerate(pairs, number):
        due, rate = step.before.rates[0], resumed.before.rates[0]
        if abs(due - rate) > 1e-9:
            return [(schedule_lost, Seen(f"the learning rate of step {index} is {rate:.2e}, not {due:.2e}", where))]
    if one.after and other.after and difference(one.after.weights, other.after.weights) > 1e-6:
        seen = f"after step {number} the parameters differ, although samples and learning rate are the same"
        return [(optimizer_lost, Seen(seen, where))]
    return []


@rule(
    why="The next job may get a different number of GPUs.",
    fix="Use get_state_dict(), torch.distributed.checkpoint.load and set_state_dict(): they reshard. Put no rank in file names.",
    runs=(WHOLE, RESTARTED),
    needs=(FineTuningReported,),
)
def reshard_fails(whole: Run, restarted: Restarted) -> Said:
    """A different number of ranks cannot resume, or has different losses."""
    if not restarted.first.trained or any(first_problem(whole, restarted)):
        return
    for run in restarted.others:
        lead = f"resumed with {plural(run.nproc, 'process')}"
        if ended := ending(run):
            yield Seen(f"{lead}: {ended.text}", ended.where, ended.detail)
            return
        done = max(0, len(losses(whole)) - len(losses(run)))
        if seen := unequal(losses(run), losses(whole)[done:], first=done + 1):
            yield Seen(f"{lead}, {seen} without the restart")
            return


@rule(
    why="Other programs, such as transformers, cannot load the checkpoint of a training.",
    fix="For transformers, write config and tokenizer with save_pretrained(), and the parameters with save_file() of "
    "safetensors. For ZeRO, save the result of get_fp32_state_dict_from_zero_checkpoint() with torch.save.",
    runs=EXPORTED,
)
def not_exported(exported: Exported) -> Said:
    """There is no exported model that transformers can load."""
    name, run, files = exported.program, exported.run, exported.files or ()
    if run is None:
        yield Seen(f"{name}, which exports the model, is missing in the folder of the program")
    elif ended := ending(run):
        yield Seen(f"{name}: {ended.text}", ended.where, ended.detail)
    elif "config.json" not in files or not any(file.endswith(".safetensors") for file in files):
        yield Seen(f"{name} writes no model that transformers can load ({', '.join(files) or 'no files'})")
    elif "tokenizer.json" not in files:
        yield Seen(f"{name} writes no tokenizer")
    elif exported.error:
        yield Seen(f"transformers cannot load the export: {exported.error}")


@rule(
    why="Users of the export get a different model than the one that you trained.",
    fix="Load the parameters of the newest checkpoint before you write the export.",
    runs=(WHOLE, EXPORTED),
    needs=(FineTuningReported,),
    after=(not_exported,),
)
def export_differs(run: Run, exported: Exported) -> Said:
    """The exported model does not have the validation loss of the trained one."""
    loss, last = exported.loss, [event.validation_loss for event in run.all(FineTuningReported)][-1:]
    if loss is not None and last and not abs(loss - last[0]) < CLOSE:
        yield Seen(f"the export has a validation loss of {loss:.4f} with transformers, the trained model {last[0]:.4f}")
