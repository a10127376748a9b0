"""Training with Accelerate: its Accelerator wraps model and optimizer, distributes the samples, gathers results, and saves."""

from workshop.check.evidence.events import AcceleratorCalled
from workshop.check.evidence.misuses import ScheduleAdvanced
from workshop.check.evidence.run import Run
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural

SEEDABLE = (
    "Create the Accelerator with dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True), and call set_epoch(epoch) "
    "on the prepared loader in each epoch. Without this, save_state() does not save the state of the generator that shuffles."
)


def fix_of_order(run: Run) -> str:
    """How the second start gets the order of its own epoch, if Accelerate shuffles; "" otherwise."""
    return (
        SEEDABLE
        if any(each.name == "prepare" and "RandomSampler" in each.of for each in run.all(AcceleratorCalled))
        else ""
    )


def _called(run: Run, method: str, argument: str = "") -> bool:
    """Whether a method was called (with an argument of this type), or might have been called without the failure."""
    calls = list(run.all(AcceleratorCalled))
    used = any(event.name == method and (not argument or argument in event.of) for event in calls)
    return used or (run.failed and bool(calls))


@rule(
    why="The Accelerator moves only prepared models to the device, and averages only their gradients.",
    fix="Call accelerator.prepare(model, optimizer), and accelerator.backward(loss) instead of loss.backward().",
    blocks=True,
)
def accelerator_idle(run: Run) -> Said:
    """Model and optimizer are not prepared, or the program calls loss.backward()."""
    where = run.trained[0].step_where if run.trained else ""
    if not _called(run, "prepare", "Optimizer"):
        yield Seen("accelerator.prepare() is not called with the model and the optimizer", where, origin="call:prepare")
    elif not _called(run, "backward"):
        yield Seen(
            "the program calls loss.backward() instead of accelerator.backward(loss)", where, origin="call:backward"
        )


@rule(
    why="An unprepared loader moves no batches to the device, may give ranks different numbers of batches, and is not saved.",
    fix="Call accelerator.prepare() on a DataLoader with shuffle=True and without a DistributedSampler.",
    origin="call:DataLoader",
)
def loader_by_hand(run: Run) -> Said:
    """The training loader is not prepared, or has its own sampler."""
    if run.trained and not _called(run, "prepare", "RandomSampler"):
        yield Seen("accelerator.prepare() is not called on a loader with shuffle=True")


@rule(
    why="A prepared loader repeats samples so that all ranks have the same number, and a plain gather counts these twice.",
    fix="Call accelerator.gather_for_metrics() on the results of each batch: it drops the repeated samples.",
    origin="call:gather|append",
)
def gathered_by_hand(run: Run) -> Said:
    """The results of the evaluation are not gathered by the Accelerator."""
    if run.trained and not _called(run, "gather_for_metrics"):
        yield Seen("gather_for_metrics() is never called")


@rule(
    why="A checkpoint saved by hand often lacks the random states, the position in the data, or the shards of other ranks.",
    fix="Call accelerator.save_state(folder) on every rank, and accelerator.load_state(folder) to resume.",
)
def state_by_hand(run: Run) -> Said:
    """The Accelerator saves no checkpoint."""
    if run.trained and not _called(run, "save_state"):
        yield Seen("save_state() is never called", origin="call:save")


@rule(
    why="Each rank saves its own random state and, with sharding, its own part of the optimizer state.",
    fix="Call accelerator.save_state() on every rank: move it out of `if accelerator.is_main_process`.",
)
def saved_by_some(run: Run) -> Said:
    """Not every rank calls save_state()."""
    calls = [(process, event) for process in run.trained for event in process.of(AcceleratorCalled)]
    saving = {process.pid: (process.rank, event.where) for process, event in calls if event.name == "save_state"}
    if saving and len(saving) < len(run.trained) and not run.failed:
        ranks = " and ".join(str(rank) for rank, _ in saving.values())
        yield Seen(f"only rank {ranks} calls save_state()", next(where for _, where in saving.values()))


@rule(
    why="The last batch is smaller, so each of its samples counts more, and the repeated samples that fill it up count too.",
    fix="Give accelerator.gather_for_metrics() one value for each sample (such as a loss with reduction='none'), and compute the "
    "mean over all gathered values.",
    needs=(AcceleratorCalled,),
    anywhere=True,
    origin=r"holds:(\bmean|loss|entropy)\w*\(",
)
def means_gathered(run: Run) -> Said:
    """The evaluation gathers one number for each batch, although the last batch is smaller."""
    for event in run.all(AcceleratorCalled):
        if event.rest:
            seen = f"gather_for_metrics() gets single numbers, such as means, but the last batch has only {event.rest} samples"
            yield Seen(f"{seen} on all ranks together", event.where)
            return


@rule(
    why="The learning rate falls with the number of processes: Accelerate supposes that each call counts a batch of one process.",
    fix="Do not pass a schedule to accelerator.prepare() that takes one step per epoch; or create "
    "Accelerator(step_scheduler_with_optimizer=False), and then each call takes one step.",
    needs=(AcceleratorCalled, ScheduleAdvanced),
    anywhere=True,
)
def scheduled_per_process(run: Run) -> Said:
    """A prepared schedule that the program steps once per epoch takes one step for each process."""
    for process in run.trained[:1] if run.nproc > 1 else ():
        for event in process.of(ScheduleAdvanced):
            if 3 * event.calls <= len(process.steps) and event.taken == event.calls * run.nproc:
                prepared = (
                    each.where
                    for each in process.of(AcceleratorCalled)
                    if each.name == "prepare" and event.kind in each.of
                )
                times = f"{plural(event.calls, 'call')} in {plural(len(process.steps), 'step')} of the optimizer"
                seen = f"step() of the prepared {event.kind} gets {times}, but takes {event.taken} steps"
                yield Seen(seen, next(prepared, event.where))
                return
