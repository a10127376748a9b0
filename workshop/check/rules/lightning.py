"""Programs with Lightning: whether its Trainer does the work, and what the exercise of stage 03 asks of it."""

import re
from collections.abc import Iterator

from workshop.check.evidence.events import (
    Backward,
    CallbacksSeen,
    LayersSeen,
    MetricsLogged,
    Raised,
    Saved,
    StepBegun,
    TrainerFit,
)
from workshop.check.evidence.real import RealRun
from workshop.check.evidence.run import Process, Run
from workshop.check.rules.collectives import collectives_differ
from workshop.check.rules.ending import crash, ending, hang, no_training
from workshop.check.rules.processes import address_overwritten, no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import ALONE, NODES_OPTION, SESSION, TASKS, WHOLE

# ---------------------------------------------------------------- the Trainer


@rule(
    why="What the Trainer does not run, it neither distributes, nor saves, nor moves to the device.",
    fix="Put the loss into LightningModule.training_step and the optimizer into configure_optimizers, and let "
    "Trainer.fit(model, datamodule=...) replace the loop.",
    runs=WHOLE,
    needs=(StepBegun, TrainerFit),
    blocks=True,
)
def trainer_idle(run: Run) -> Said:
    """The program's own loop takes the steps, or nothing does."""
    steps = [step for process in run.processes for step in process.steps]
    if any(step.before.fitting for step in steps):
        return
    if steps:
        yield Seen("a loop of the program takes the steps, not a Trainer", steps[0].before.where)
    elif not any(run.all(TrainerFit)):
        yield Seen("Trainer.fit() is never called")


# What Lightning says in an exception, and the same in the words of the exercises.
REFUSALS = {
    "wrong-group": (
        r"You set `devices=(\d+)` and `num_nodes=(\d+)` in Lightning.* match the world size \((\d+)\)",
        r"the Trainer expects \1 x \2 processes (devices x num_nodes), but \3 were started",
    ),
    "step-missing": (
        r"No `(training_step|configure_optimizers|train_dataloader)\(\)` method defined",
        r"the Trainer finds no \1()",
    ),
    "schedule-uneven": (
        r"Tried to step (\d+) times. The specified number of total steps is (\d+)",
        r"the schedule was created for \2 steps, but the run takes more",
    ),
}


def _refused(run: Run, kind: str) -> Iterator[Seen]:
    """The exception that ended the run, in plain words, if it is of this kind."""
    found = run.first_exception()
    sign, seen = REFUSALS[kind]
    if found and not run.hung and not run.flooded and (match := re.search(sign, found[1].message)):
        yield Seen(match.expand(seen), found[1].where, found[1].traceback)


@rule(
    why="The Trainer calls the methods of the module by their names, so each of them has to exist.",
    fix="Define LightningModule.training_step (it returns the loss), configure_optimizers (it returns the optimizer), and "
    "train_dataloader in the LightningDataModule.",
    runs=WHOLE,
    needs=(Raised,),
    instead_of=(crash, no_group),
    blocks=True,
)
def step_missing(run: Run) -> Said:
    """A method that the Trainer calls is not defined."""
    return _refused(run, "step-missing")


@wrong_group.also(WHOLE, needs=(Raised,), instead_of=(crash, no_group))
def other_number_than_devices(run: Run) -> Said:
    """Lightning itself refuses the number of processes."""
    return _refused(run, "wrong-group")


# Where one of these has found something, the run is not the training that the exercise asks for.
NOT_TRAINED = (trainer_idle, step_missing, no_group, wrong_group, address_overwritten, collectives_differ, no_training)


def _rank_0(run: Run) -> list[Process]:
    """The first rank of a run that trained to its end; of any other run, no rank."""
    return [] if run.failed else run.trained[:1]


# ---------------------------------------------------------------- images


@rule(
    why="The model is made for images of a different shape.",
    fix='In the transform, convert each image to RGB and resize it: image.convert("RGB").resize((32, 32)).',
    runs=WHOLE,
    needs=(Backward, StepBegun),
    after=NOT_TRAINED,
)
def wrong_images(run: Run) -> Said:
    """The model is given images of another shape than asked for."""
    wanted = run.asked.images if run.asked else None
    for process in _rank_0(run) if wanted else ():
        backwards = process.steps[0].backwards
        forward = backwards[0].forward if backwards else None
        shape = forward.shape if forward else None
        if shape != wanted:
            given, asked = (" x ".join(map(str, each or ())) for each in (shape, wanted))
            yield Seen(f"the model is given images of {given}, not {asked}", process.data_where)


@rule(
    why="No later layer sees what the stem discards, and of small images too little is left.",
    fix="Replace the stem by a convolution with kernel size 3, stride 1 and padding 1, without pooling.",
    runs=WHOLE,
    needs=(LayersSeen, StepBegun, Backward),
    after=(*NOT_TRAINED, wrong_images),
)
def stem_shrinks(run: Run) -> Said:
    """The first layers do not keep the pixels of the image."""
    size: tuple[int, ...] = run.asked.images[1:] if run.asked and run.asked.images else ()
    for process in _rank_0(run) if size else ():
        layers = process.first(LayersSeen)
        convolved = layers.convolved if layers else []
        if convolved.count(size) < 3:
            later = convolved[min(1, len(convolved) - 1)] if convolved else (0, 0)
            whole, left = (" x ".join(map(str, each)) for each in (size, later))
            yield Seen(f"of {whole} pixels the first block returns {left}", process.data_where)


# ---------------------------------------------------------------- the learning rate


@rule(
    why="A learning rate that fits the first steps is too high for the last, or the other way round.",
    fix="Return a schedule from configure_optimizers, such as OneCycleLR with "
    "total_steps=self.trainer.estimated_stepping_batches.",
    runs=WHOLE,
    needs=(StepBegun,),
    after=NOT_TRAINED,
)
def schedule_flat(run: Run) -> Said:
    """The learning rate never changes."""
    for process in _rank_0(run):
        rates = [step.before.rates[0] for step in process.steps]
        if len(set(rates)) == 1:
            seen = f"the learning rate is {rates[0]:.1e} at all {plural(len(rates), 'step')}"
            yield Seen(seen, process.steps[0].before.where)


@rule(
    why="A schedule of a different length than the run ends too early, or never reaches its end.",
    fix='Return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step"}}, with '
    "total_steps=self.trainer.estimated_stepping_batches: Lightning then advances it once per step.",
    runs=WHOLE,
    needs=(StepBegun,),
    after=(*NOT_TRAINED, schedule_flat),
)
def schedule_uneven(run: Run) -> Said:
    """The learning rate does not rise and fall once over the steps of the run."""
    for process in _rank_0(run):
        rates, where = [step.before.rates[0] for step in process.steps], process.steps[0].before.where
        shown = ", ".join(f"{rate:.1e}" for rate in rates[:8]) + (", ..." if len(rates) > 8 else "")
        top = rates.index(max(rates))
        rises, falls = rates[: top + 1], rates[top:]
        once = rises == sorted(rises) and falls == sorted(falls, reverse=True)
        if len(set(rates)) < len(rates):
            yield Seen(f"the learning rate does not change with each step: {shown}", where)
        elif not once or rates[-1] > 0.05 * rates[top]:
            yield Seen(f"the learning rate does not fall to its end by the last step: {shown}", where)


@schedule_uneven.also(WHOLE, needs=(Raised,), instead_of=(crash,))
def schedule_over(run: Run) -> Said:
    """The schedule itself refuses further steps."""
    return _refused(run, "schedule-uneven")


# ---------------------------------------------------------------- the best model, the end, the log


@rule(
    why="The last epoch is not always the best, and a model that is not kept is gone.",
    fix='Add ModelCheckpoint(folder, name, monitor="accuracy", mode="max") beside the checkpoint to resume from.',
    runs=WHOLE,
    needs=(Saved, CallbacksSeen),
    after=NOT_TRAINED,
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
        yield Seen("only one checkpoint is kept, the last: if the accuracy falls, the best model is gone", where)
    elif seen and max(seen) not in kept.values():
        values = ", ".join(f"{value:.1%}" for value in kept.values() if value is not None)
        yield Seen(f"the best accuracy was {max(seen):.1%}; the checkpoints that are kept have {values}", where)
    elif smallest:
        yield Seen(f"it keeps the checkpoint with the lowest {smallest[0]}", where)


def _watched(run: Run, which: str) -> list[tuple[str, str]]:
    """(monitor, mode) of each EarlyStopping ("stop") or ModelCheckpoint ("best")."""
    return [pair for process in run.ranks[:1] for event in process.of(CallbacksSeen) for pair in getattr(event, which)]


@rule(
    why="You pay for epochs in which the model learns nothing any more.",
    fix='Add EarlyStopping("accuracy", mode="max", patience=5) to the callbacks.',
    runs=WHOLE,
    needs=(CallbacksSeen,),
    after=NOT_TRAINED,
)
def never_stops(run: Run) -> Said:
    """Nothing watches the accuracy."""
    if not run.failed and not _watched(run, "stop"):
        yield Seen("nothing ends the training when the accuracy no longer rises")


@rule(
    why="The training ends while the model still learns.",
    fix='Give EarlyStopping mode="max" for an accuracy; its default, "min", is for a loss.',
    runs=WHOLE,
    needs=(CallbacksSeen,),
    after=NOT_TRAINED,
)
def stops_too_early(run: Run) -> Said:
    """It stops as soon as the accuracy rises."""
    for monitor, mode in _watched(run, "stop"):
        if "acc" in monitor and mode == "min":
            yield Seen(f"it stops when {monitor} no longer falls")


@rule(
    why="Without a log nobody can see afterwards why a run went as it did.",
    fix='Give the Trainer a logger, such as CSVLogger, and LearningRateMonitor("step") as a callback.',
    runs=WHOLE,
    needs=(MetricsLogged,),
    after=NOT_TRAINED,
)
def not_logged(run: Run) -> Said:
    """No logger receives the learning rate."""
    names = {name for process in run.ranks[:1] for event in process.of(MetricsLogged) for name in event.names}
    if run.failed:
        return
    if not names:
        yield Seen("no logger receives any metric")
    elif not any("lr" in name.lower() or "learning" in name.lower() for name in names):
        yield Seen(f"the logger receives {', '.join(sorted(names)[:4])}, but no learning rate")


# ---------------------------------------------------------------- several nodes, and sessions that are jobs

IN_SESSION, BY_ITSELF, BY_SRUN = "inside a Slurm job of one task", "started by itself", "as two tasks of srun"


@rule(
    why="On two nodes the processes have to know of both, or each node trains by itself.",
    fix="Give the Trainer num_nodes=args.nodes.",
    runs=NODES_OPTION,
)
def nodes_ignored(run: Run) -> Said:
    """A run on two nodes fails, or makes no common group."""
    wrong = ending(run) or _group(run)
    if wrong:
        yield Seen(f"on 2 nodes of 2 processes: {wrong.text}", wrong.where, wrong.detail)
    elif not run.trained:
        yield Seen("on 2 nodes of 2 processes it takes no step")


def _group(run: Run) -> Seen | None:
    """What is wrong with the group of a run, if anything."""
    for each in (no_group, wrong_group):
        for said in each.detectors[0].function(run):
            if isinstance(said, Seen):
                return said
    return None


@rule(
    why="A Jupyter session on a cluster is a Slurm job of one task: a program that takes it for srun's does not start, or trains "
    "with one process.",
    fix="Give the Trainer an environment plugin chosen by what started the process: TorchElasticEnvironment under torchrun, "
    "SLURMEnvironment where SLURM_STEP_NUM_TASKS is above 1, else LightningEnvironment.",
    runs=SESSION,
)
def job_mistaken(run: RealRun) -> Said:
    """Inside a job of one task it does not start its second process."""
    return _not_two(run, IN_SESSION)


@wrong_group.also(ALONE, active=True)
def wrong_group_alone(run: RealRun) -> Said:
    """Started as one process, Lightning does not start the other."""
    return _not_two(run, BY_ITSELF)


@wrong_group.also(TASKS, active=True)
def wrong_group_of_tasks(run: RealRun) -> Said:
    """Started as two tasks by srun, they do not make one group."""
    return _not_two(run, BY_SRUN)


def _not_two(run: RealRun, how: str) -> Iterator[Seen]:
    """Why it did not come to a training by two processes."""
    if None in run.statuses:
        return  # it hangs
    text = ""
    if any(run.statuses):
        text = f"{how} it fails: {run.error}"
    elif run.text.count("training on ") > 1:
        text = f"{how}, each process trains for itself"
    elif run.processes != (2,):
        count = run.processes[0] if run.processes else 0
        text = f"{how}, with --devices 2, {plural(count, 'process')} {'trains' if count == 1 else 'train'}"
    if text:
        yield Seen(text, detail=run.text[-3000:])


def _hangs(run: RealRun, how: str) -> Iterator[Seen]:
    if None in run.statuses:
        yield Seen(f"{how} it had not ended after {run.limit:.0f} s", detail=run.text[-3000:])


@hang.also(SESSION)
def hang_in_session(run: RealRun) -> Said:
    """It does not end inside a job of one task."""
    return _hangs(run, IN_SESSION)


@hang.also(ALONE)
def hang_alone(run: RealRun) -> Said:
    """It does not end when it starts its processes itself."""
    return _hangs(run, BY_ITSELF)


@hang.also(TASKS)
def hang_as_tasks(run: RealRun) -> Said:
    """It does not end as two tasks of srun."""
    return _hangs(run, BY_SRUN)
