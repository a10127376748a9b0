"""Training with Accelerate: its Accelerator wraps model and optimizer, distributes the samples, gathers results, and saves."""

from workshop.check.evidence.events import AcceleratorCalled
from workshop.check.evidence.run import Run
from workshop.check.rules.rule import Said, Seen, rule


def _called(run: Run, method: str, argument: str = "") -> bool:
    """Whether a method was called (with an argument of this type), or may have been if the run had not failed."""
    calls = list(run.all(AcceleratorCalled))
    used = any(event.name == method and (not argument or argument in event.of) for event in calls)
    return used or (run.failed and bool(calls))


@rule(
    why="The Accelerator neither moves to the device nor averages what it has not prepared.",
    fix="model, optimizer = accelerator.prepare(model, optimizer), and accelerator.backward(loss) in place of loss.backward().",
    blocks=True,
)
def accelerator_idle(run: Run) -> Said:
    """Model and optimizer are not prepared, or backward() is not the Accelerator's."""
    where = run.trained[0].step_where if run.trained else ""
    if not _called(run, "prepare", "AdamW"):
        yield Seen("no Accelerator has prepared model and optimizer", where)
    elif not _called(run, "backward"):
        yield Seen("the program calls backward() of the loss, not of the Accelerator", where)


@rule(
    why="Without prepare() a loader moves nothing to the device, gives ranks unequal numbers of batches, and is not saved.",
    fix="Pass a DataLoader with shuffle=True and without a DistributedSampler to accelerator.prepare().",
)
def loader_by_hand(run: Run) -> Said:
    """The loader to train with is not prepared, or has a sampler of its own."""
    if run.trained and not _called(run, "prepare", "RandomSampler"):
        yield Seen("the Accelerator has prepared no loader that shuffles")


@rule(
    why="Prepared loaders repeat samples at the end so that all ranks have the same number; only the Accelerator knows which.",
    fix="Call accelerator.gather_for_metrics() on the results of each batch: it drops the repeated samples.",
)
def gathered_by_hand(run: Run) -> Said:
    """The results of the evaluation are not gathered by the Accelerator."""
    if run.trained and not _called(run, "gather_for_metrics"):
        yield Seen("gather_for_metrics() is never called")


@rule(
    why="Random states, the position of the loader and each rank's own part are easily left out of a checkpoint by hand.",
    fix="Call accelerator.save_state(folder) on every rank, and accelerator.load_state(folder) to resume.",
)
def state_by_hand(run: Run) -> Said:
    """The Accelerator saves no checkpoint."""
    if run.trained and not _called(run, "save_state"):
        yield Seen("save_state() is never called")


@rule(
    why="Each rank has a random state of its own, and perhaps a part of the optimizer's state, which the others do not save.",
    fix="Call accelerator.save_state() on every rank: move it out of `if accelerator.is_main_process`.",
)
def saved_by_some(run: Run) -> Said:
    """Not every rank calls save_state()."""
    calls = [(process, event) for process in run.trained for event in process.of(AcceleratorCalled)]
    saving = {process.pid: (process.rank, event.where) for process, event in calls if event.name == "save_state"}
    if saving and len(saving) < len(run.trained) and not run.failed:
        ranks = " and ".join(str(rank) for rank, _ in saving.values())
        yield Seen(f"only rank {ranks} calls save_state()", next(where for _, where in saving.values()))
