"""Programs with Lightning: whether the Trainer runs the training, and what the exercise of stage 03 asks for."""

import re
from functools import partial

from workshop.check.evidence.events import (
    CallbacksSeen,
    LayersSeen,
    MetricsLogged,
    MonitorSeen,
    Saved,
    TrainerFit,
)
from workshop.check.evidence.misuses import DataModuleSeen, SamplesCounted, StatePrepared
from workshop.check.evidence.real import RealRun
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE
from workshop.check.rules.collectives import collectives_differ
from workshop.check.rules.ending import crash, ended_early, ending, hang, no_training
from workshop.check.rules.processes import address_overwritten, no_group, wrong_group
from workshop.check.rules.rule import Rule, Said, Seen, Told, also, findings, rule
from workshop.check.rules.words import named, plural
from workshop.check.scenarios import ALONE, NODES_OPTION, SESSION, TASKS, WHOLE


@rule(
    why="Lightning distributes the data, saves checkpoints and uses the GPU only in a training that Trainer.fit() runs.",
    fix="Move the loop to LightningModule.training_step and configure_optimizers; call Trainer.fit(model, datamodule=...).",
    blocks=True,
)
def trainer_idle(run: Run) -> Said:
    """The program has a training loop of its own, or does not train at all."""
    steps = [step.before for process in run.processes for step in process.steps]
    if steps and not any(step.fitting for step in steps):
        yield Seen("the program trains in a loop of its own, not with a Trainer", steps[0].where)
    elif not steps and not any(run.all(TrainerFit)):
        yield Seen("Trainer.fit() is never called")


@rule(
    why="The samples per second in the log are too small or too large by the same factor.",
    fix="batch_size_fn of ThroughputMonitor gets a batch, and must return the number of samples in it, such as "
    "lambda batch: len(batch[0]) for a batch of images and labels.",
    needs=(SamplesCounted,),
    anywhere=True,
)
def throughput_miscounted(run: Run) -> Said:
    """ThroughputMonitor gets a different number than a batch has samples."""
    for event in run.trained[0].of(SamplesCounted)[:1] if run.trained else ():
        if event.counted != event.rows:
            seen = f"batch_size_fn returns {event.counted} for a batch of {plural(event.rows, 'sample')}"
            yield Seen(seen, event.where, origin="call:ThroughputMonitor")


@rule(
    why="Lightning calls prepare_data() in one process of each node only, so the other ranks train on different data.",
    fix="Download or write files in LightningDataModule.prepare_data(), and set attributes in setup(), which all ranks call.",
    needs=(StatePrepared, DataModuleSeen),
    after=(no_group, wrong_group),
    anywhere=True,
)
def set_on_one_rank(run: Run) -> Said:
    """An attribute that prepare_data() sets has a different value on the ranks that do not call it."""
    values = [event.values for process in run.trained for event in process.of(DataModuleSeen)[:1]]
    for event in run.all(StatePrepared):
        for name in event.names if len(values) > 1 else ():
            if len({each.get(name) for each in values}) > 1:
                seen = f"prepare_data() sets self.{name} on one rank only: the ranks have {values[0].get(name, 'no value')} and "
                other = next(each.get(name, "no value") for each in values if each.get(name) != values[0].get(name))
                yield Seen(seen + other, event.where, origin=f"prepared:{name}")
                return


@set_on_one_rank.also(WHOLE, needs=(StatePrepared,), instead_of=(crash, ended_early))
def missing_on_the_others(run: Run) -> Said:
    """A rank fails because it does not have an attribute that prepare_data() sets."""
    found = run.first_exception()
    missing = re.search(r"object has no attribute '(\w+)'", found[1].message) if found else None
    for event in run.all(StatePrepared):
        if found and missing and missing[1] in event.names and event not in found[0].of(StatePrepared):
            seen = f"prepare_data() sets self.{missing[1]} on one rank only, and {named(found[0])} fails without it"
            yield Seen(seen, event.where, found[1].traceback, origin=f"prepared:{missing[1]}")
            return


def _refused(run: Run, sign: str, seen: str) -> Said:
    """Translate the exception of Lightning that ended the run, if it matches ``sign``."""
    found = run.first_exception()
    if found and not run.hung and not run.flooded and (match := re.search(sign, found[1].message)):
        yield Seen(match.expand(seen), found[1].where, found[1].traceback)


@rule(
    why="The Trainer calls the methods of the module by their names, so each of them must exist.",
    fix="Define LightningModule.training_step and .configure_optimizers, and LightningDataModule.train_dataloader.",
    instead_of=(crash, ended_early, no_group),
    blocks=True,
)
def step_missing(run: Run) -> Said:
    """A method that the Trainer calls is not defined."""
    sign = r"No `(training_step|configure_optimizers|train_dataloader)\(\)` method defined"
    return _refused(run, sign, r"the Trainer finds no \1()")


@wrong_group.also(WHOLE, instead_of=(crash, ended_early, no_group))
def other_number_than_devices(run: Run) -> Said:
    """Lightning rejects the number of processes."""
    sign = r"You set `devices=(\d+)` and `num_nodes=(\d+)` in Lightning.* match the world size \((\d+)\)"
    return _refused(run, sign, r"Lightning expects \1 x \2 processes (devices x num_nodes), but \3 were started")


# If one of these has found something, the run is not the training that the exercise asks for.
NOT_TRAINED = (trainer_idle, step_missing, no_group, wrong_group, address_overwritten, collectives_differ, no_training)

_of_training = partial(rule, after=NOT_TRAINED)


@_of_training(
    why="The model is made for images of a different shape.",
    fix='In the transform, convert each image to RGB and resize it: image.convert("RGB").resize((32, 32)).',
)
def wrong_images(run: Run) -> Said:
    """The model gets images of a different shape than asked for."""
    wanted = run.asked.images if run.asked else None
    for process in run.first_rank if wanted else ():
        shape = next((each.forward.shape for each in process.steps[0].backwards[:1] if each.forward), None)
        if shape != wanted:
            given, asked = (" x ".join(map(str, each or ())) for each in (shape, wanted))
            yield Seen(f"the model gets images of {given}, not {asked}", process.data_where)


@_of_training(
    why="The stem reduces small images to very few pixels, and later layers cannot recover the lost detail.",
    fix="Replace the stem by Conv2d(..., kernel_size=3, stride=1, padding=1), without pooling.",
    needs=(LayersSeen,),
    after=(*NOT_TRAINED, wrong_images),
    origin="call:Conv2d",
)
def stem_shrinks(run: Run) -> Said:
    """The first layers reduce the size of the image."""
    size: tuple[int, ...] = run.asked.images[1:] if run.asked and run.asked.images else ()
    for process in run.first_rank if size else ():
        convolved = [each for layers in process.of(LayersSeen)[:1] for each in layers.convolved]
        forwards = max(1, len(process.steps[0].backwards) if process.steps else 1)
        if convolved.count(size) < 3 * forwards:
            later = convolved[:2][-1] if convolved else (0, 0)
            whole, left = (" x ".join(map(str, each)) for each in (size, later))
            yield Seen(f"the first block reduces {whole} pixels to {left}", process.data_where)


@_of_training(
    why="A constant learning rate that suits the first steps is too high for the last steps.",
    fix="In LightningModule.configure_optimizers, return a schedule too, such as OneCycleLR(..., total_steps=...).",
    origin="returned:configure_optimizers",
)
def schedule_flat(run: Run) -> Said:
    """The learning rate never changes."""
    for process in run.first_rank:
        rates = [step.before.rates[0] for step in process.steps]
        if len(set(rates)) == 1:
            yield Seen(f"the learning rate is {rates[0]:.1e} at all {plural(len(rates), 'step')}", process.step_where)


@_of_training(
    why="A schedule of a different length than the run ends too early, or never reaches its end.",
    fix='In LightningModule.configure_optimizers, return "lr_scheduler": {"scheduler": ..., "interval": "step"}, with '
    "total_steps=self.trainer.estimated_stepping_batches.",
    after=(*NOT_TRAINED, schedule_flat),
    origin="returned:configure_optimizers",
)
def schedule_uneven(run: Run) -> Said:
    """The learning rate does not rise and fall once over the steps of the run."""
    for process in run.first_rank:
        rates, where = [step.before.rates[0] for step in process.steps], process.step_where
        shown = ", ".join(f"{rate:.1e}" for rate in rates[:8]) + (", ..." if len(rates) > 8 else "")
        top = rates.index(max(rates))
        rises_and_falls = sorted(rates[:top]) + sorted(rates[top:], reverse=True)
        if len(set(rates)) < len(rates):
            yield Seen(f"the learning rate does not change with each step: {shown}", where)
        elif rates != rises_and_falls or rates[-1] > 0.05 * rates[top]:
            yield Seen(f"the learning rate does not rise once and then fall to almost 0: {shown}", where)


@schedule_uneven.also(WHOLE, instead_of=(crash, ended_early))
def schedule_over(run: Run) -> Said:
    """The schedule raises an error because the run takes more steps."""
    sign = r"Tried to step (\d+) times. The specified number of total steps is (\d+)"
    return _refused(run, sign, r"the schedule was created for \2 steps, but the run takes more")


def _watched(run: Run, which: str) -> list[tuple[str, str]]:
    """(monitor, mode) of each EarlyStopping ("stop") or ModelCheckpoint ("best")."""
    return [pair for process in run.ranks[:1] for event in process.of(CallbacksSeen) for pair in getattr(event, which)]


@_of_training(
    why="The last epoch is not always the best, and you cannot restore a model that was not saved.",
    fix='Add ModelCheckpoint(folder, name, monitor="accuracy", mode="max") in addition to the checkpoint to resume from.',
    origin="call:ModelCheckpoint",
)
def best_lost(run: Run) -> Said:
    """The checkpoint with the best accuracy is not kept."""
    if run.failed:
        return
    saves = [event for event in run.all(Saved) if event.path and event.whole]
    kept = {event.path: event.accuracy for event in saves}  # what each file contains in the end
    seen = [event.accuracy for event in saves if event.accuracy is not None]
    where = saves[0].where if saves else ""
    smallest = [monitor for monitor, mode in _watched(run, "best") if "acc" in monitor and mode == "min"]
    if len(kept) < 2:
        yield Seen("only the last checkpoint is kept: if the accuracy falls, the best model is lost", where)
    elif seen and max(seen) not in kept.values():
        values = ", ".join(f"{value:.1%}" for value in kept.values() if value is not None)
        yield Seen(f"the best accuracy was {max(seen):.1%}; the checkpoints that are kept have {values}", where)
    elif smallest:
        yield Seen(f"ModelCheckpoint keeps the checkpoint with the lowest {smallest[0]}", where)


@_of_training(
    why="Epochs in which the model no longer improves cost time without any benefit.",
    fix='Add EarlyStopping("accuracy", mode="max", patience=5) to the callbacks.',
    origin="call:Trainer.callbacks|Trainer",
)
def never_stops(run: Run) -> Said:
    """No callback stops the training when the accuracy no longer rises."""
    if not run.failed and not _watched(run, "stop"):
        yield Seen("nothing ends the training when the accuracy no longer rises")


@_of_training(
    why="The training ends while the model still improves.",
    fix='Give EarlyStopping mode="max" for an accuracy; its default, "min", is for a loss.',
    origin="call:EarlyStopping",
)
def stops_too_early(run: Run) -> Said:
    """EarlyStopping watches the accuracy, but waits for it to fall."""
    for monitor, mode in _watched(run, "stop"):
        if "acc" in monitor and mode == "min":
            yield Seen(f"EarlyStopping ends the training when {monitor} no longer falls")


@rule(
    why="Each rank has the value of its own part, so callbacks decide from only a part of the data.",
    fix="In the LightningModule, call self.log(..., sync_dist=True), or log a metric object of torchmetrics.",
    needs=(MonitorSeen,),
    after=NOT_TRAINED[1:],
    anywhere=True,
)
def monitor_differs(run: Run) -> Said:
    """A value that a callback or a schedule monitors differs between the ranks."""
    for together in zip(*(process.of(MonitorSeen) for process in run.trained), strict=False):
        values, names = [event.value for event in together], {event.name for event in together}
        if len(names) == 1 and max(values) - min(values) > CLOSE * max(map(abs, values)):
            shown = " and ".join(f"{value:.4g}" for value in values[:4])
            yield Seen(f"the ranks monitor {together[0].name} with the values {shown}", together[0].where)
            return


@_of_training(
    why="Without a log you cannot find out afterwards why a run went well or badly.",
    fix='Give the Trainer a logger, such as CSVLogger, and LearningRateMonitor("step") as a callback.',
    origin="call:Trainer.logger|Trainer",
)
def not_logged(run: Run) -> Said:
    """No logger receives the learning rate."""
    names = {name for process in run.ranks[:1] for event in process.of(MetricsLogged) for name in event.names}
    if run.failed or any("lr" in name.lower() or "learning" in name.lower() for name in names):
        return
    got = f"the logger receives {', '.join(sorted(names)[:4])}, but no learning rate"
    yield Seen(got if names else "no logger receives any metric")


@rule(
    why="The Trainer must know the number of nodes; otherwise each node trains a separate model.",
    fix="Give the Trainer num_nodes=args.nodes.",
    runs=NODES_OPTION,
    origin="call:Trainer.num_nodes|Trainer",
)
def nodes_ignored(run: Run) -> Said:
    """A run on two nodes fails, or its processes do not form one group."""
    groups = (said for each in (no_group, wrong_group) for said in each.detectors[0].function(run))
    wrong = ending(run) or next((said for said in groups if isinstance(said, Seen)), None)
    if wrong:
        yield Seen(f"on 2 nodes with 2 processes each: {wrong.text}", wrong.where, wrong.detail)
    elif not run.trained:
        yield Seen("on 2 nodes with 2 processes each it takes no step")


HOW = {SESSION: "in a Slurm job with one task", ALONE: "without a launcher", TASKS: "as two tasks of srun"}


@rule(
    why="A Jupyter session on a cluster is a Slurm job with one task: a program that expects srun there fails or trains alone.",
    fix="Give the Trainer the environment plugin of the launcher: TorchElasticEnvironment under torchrun, "
    "SLURMEnvironment where SLURM_STEP_NUM_TASKS is above 1, else LightningEnvironment.",
    runs=SESSION,
    origin="text:SLURM_JOB_ID call:Trainer.plugins|Trainer",
)
def job_mistaken(run: RealRun) -> Said:
    """In a job with one task, the program does not start its second process."""
    return findings(job_mistaken, _not_two, job_mistaken, HOW[SESSION], run)


def _not_two(about: Rule, how: str, run: RealRun) -> Told:
    """Why two processes did not train together."""
    if None in run.statuses:
        yield hang, Seen(f"{how} it had not ended after {run.limit:.0f} s", detail=run.end)
    elif any(run.statuses):
        yield about, Seen(f"{how} it fails: {run.error}", detail=run.end)
    elif run.text.count("training on ") > 1:
        yield about, Seen(f"{how}, each process trains a separate model", detail=run.end)
    elif run.processes != (2,):
        count = run.processes[0] if run.processes else 0
        seen = f"{how}, it trains with {plural(count, 'process')}, not with the 2 of --devices"
        yield about, Seen(seen, detail=run.end)


also(hang, runs=SESSION)(partial(_not_two, job_mistaken, HOW[SESSION]))
for _scenario in (ALONE, TASKS):
    also(hang, runs=_scenario)(partial(_not_two, wrong_group, HOW[_scenario]))
    also(wrong_group, runs=_scenario, active=True)(partial(_not_two, wrong_group, HOW[_scenario]))
