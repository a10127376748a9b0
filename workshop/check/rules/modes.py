"""Whether models with dropout or BatchNorm are in the right mode, and evaluated with the same statistics on all ranks."""

from workshop.check.evidence.events import Evaluated, ModelUpdated, Saved
from workshop.check.evidence.misuses import FrozenAtRandom, ModeEvaluated, ModeSeen, StatisticsSeen, StatisticsStale
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import difference
from workshop.check.rules.exchanges import exchanged
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural

APART = 1e-3  # relative difference of statistics; those of equal samples differ only by rounding
FEW = 8  # samples


@rule(
    why="In evaluation mode dropout does nothing and BatchNorm does not use the batch, so the model trains in a different way "
    "than before, and than after a resume.",
    fix="Call model.train() after each evaluation, for example at the start of each epoch.",
    needs=(ModeSeen,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def left_in_evaluation(run: Run) -> Said:
    """A model that was trained in training mode is trained in evaluation mode from some step to the end."""
    for process in run.trained[:1]:
        modes: dict[str, list[tuple[int, ModeSeen]]] = {}
        for seconds, event in process.timed(ModeSeen):
            steps = sum(step.seconds <= seconds for step in process.steps)
            modes.setdefault(event.model, []).append((steps, event))
        for model, changes in modes.items():
            steps, last = changes[-1]
            if len(changes) > 1 and not last.training and steps + 1 < len(process.steps):
                seen = f"from step {steps + 1} on {model} trains in evaluation mode"
                seen += f": after eval() at {last.called} the program does not call train()"
                yield Seen(seen, last.called, origin="once:train")
                return


@rule(
    why="In training mode dropout changes the outputs at random and BatchNorm uses the batch, so the metric is that of a "
    "different model, and differs from one evaluation to the next.",
    fix="Call model.eval() before the evaluation, and model.train() after it.",
    needs=(ModeSeen, ModeEvaluated),
    after=(no_group, wrong_group),
    anywhere=True,
)
def evaluated_in_training(run: Run) -> Said:
    """The only model that is evaluated is the trained one, on held-out samples, and always in training mode."""
    for process in run.trained[:1]:
        modes = process.of(ModeEvaluated)
        if (
            len(modes) != 1
            or not modes[0].training
            or modes[0].model not in {each.model for each in process.of(ModeSeen)}
        ):
            continue
        trained = {key for step in process.steps for key in step.keys}
        passes = [each for each in process.of(Evaluated) if each.forward.loader and not each.forward.refreshes]
        held_out = {key for each in passes for key in each.forward.names(process.identity)} - trained
        if len(held_out) >= FEW:
            seen = f"{modes[0].model} is evaluated on {plural(len(held_out), 'held-out sample')} in training mode"
            yield Seen(seen, modes[0].where)


@rule(
    why="Its answers are different each time, so what is learned from it, or compared with it, is partly noise. It has no "
    "gradients, but that does not switch off dropout.",
    fix="Call model.eval() of the frozen model once, after it has been made or loaded, and before it is wrapped.",
    needs=(FrozenAtRandom,),
    after=(no_group, wrong_group),
    instead_of=(evaluated_in_training,),
    anywhere=True,
)
def frozen_in_training(run: Run) -> Said:
    """A model that never changes, such as a teacher or the reference of a policy, is always called with dropout."""
    for event in run.trained[0].of(FrozenAtRandom)[:1] if run.trained else ():
        seen = f"{event.model} is frozen, but always called in training mode, with dropout, during {plural(event.steps, 'step')}"
        yield Seen(seen, event.where)


@rule(
    why="Each rank measures a different model, and a checkpoint has the statistics of one rank.",
    fix="Average running_mean and running_var over the ranks with all_reduce before an evaluation, use SyncBatchNorm, or let "
    "DistributedDataParallel send the buffers of rank 0 (broadcast_buffers=True).",
    needs=(StatisticsSeen,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def statistics_differ(run: Run) -> Said:
    """The ranks evaluate the same model with different statistics of BatchNorm."""
    ranks = [{(each.model, each.steps): each for each in process.of(StatisticsSeen)} for process in run.trained]
    for key, first in ranks[0].items() if len(ranks) > 1 and not run.divided else ():
        others = [each[key] for each in ranks[1:] if key in each]
        if first.steps and any(difference(first.statistics, other.statistics) > APART for other in others):
            seen = f"after {plural(first.steps, 'step')} the ranks evaluate {first.model} with different statistics of BatchNorm"
            wrapped = "call:DistributedDataParallel.broadcast_buffers|DDP.broadcast_buffers here"
            # If only the results of one rank are used, it measures one model, as with the buffers of rank 0.
            yield Seen(
                seen, first.where, origin=wrapped, mild=not exchanged(run.trained[0]) and not any(run.all(Saved))
            )
            return


@rule(
    why="BatchNorm normalizes with the statistics of other parameters, so the evaluation, and the copy that is saved, are wrong.",
    fix="Call torch.optim.swa_utils.update_bn(loader, averaged_model) after the last update. In a moving average of your own, "
    "copy the buffers of the model too, each time that you update its parameters.",
    needs=(StatisticsStale,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def statistics_stale(run: Run) -> Said:
    """A copy of the model, such as an average, is evaluated with statistics of BatchNorm that do not fit its parameters."""
    for process in run.trained[:1]:
        for event in process.of(StatisticsStale)[:1]:
            if event.averaged:
                seen = "an AveragedModel is evaluated, but update_bn() was not called: its BatchNorm has statistics of the model"
                yield Seen(seen, event.where, origin="used:AveragedModel call:AveragedModel")
                return
            updates = [each.calls[0][1] for each in process.of(ModelUpdated) if each.calls]
            seen = f"{event.model}, a copy of the model, has new parameters in each evaluation, but its BatchNorm never changes"
            yield Seen(seen, updates[0] if updates else event.where)
