"""The schedules of the learning rate: their lengths, and whether all ranks take their steps alike."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, takewhile

from workshop.check.evidence.events import (
    AcceleratorCalled,
    CallbacksSeen,
    Collective,
    LoaderStarted,
    ScheduleSeen,
    StepBegun,
)
from workshop.check.evidence.misuses import PlateauSeen, ScheduleStepped
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE
from workshop.check.rules.gradients import gradients_differ, weights_differ
from workshop.check.rules.lightning import monitor_differs
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rounds import of_its_own
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import named

# Metrics that are better if they are larger, and smaller, as parts of a name such as "val_accuracy".
LARGER = re.compile(
    r"acc(uracy|s)?|auc|auroc|f1|m?iou|dice|psnr|ssim|bleu|rouge|recall|precision|ndcg|mrr|hits|r2|top\d"
)
SMALLER = re.compile(
    r"loss(es)?|perplexity|ppl|nll|err(or)?|r?mse|mae|wer|cer|neg(ative)?|minus|inv(erse)?|distance|fid"
)
LENGTHS = ("total_steps", "T_max", "total_iters")  # arguments with the length of a schedule
UNIT = "If the schedule counts steps, call its step() after each optimizer.step(); if it counts epochs, at the end of each epoch."
PREPARED = (
    "Multiply the length of the schedule by accelerator.num_processes, or do not give the schedule to prepare() and call its "
    "step() once for each step of the optimizer."
)


@rule(
    why="If a schedule has a different number of steps than the run, it ends too early, or never reaches its low rates.",
    fix="Count the optimizer steps of one rank: the batches of its DataLoader, times the epochs, divided by the accumulation.",
    needs=(ScheduleSeen, ScheduleStepped),
    after=(no_group, wrong_group),
    anywhere=True,
)
def schedule_length(run: Run) -> Said:
    """The schedule is as long as the steps of all processes together, or shorter by their number."""
    for process in run.trained[:1] if not run.failed and run.nproc > 1 else ():
        if any(event.kind == "SWALR" for event in process.of(ScheduleStepped)):
            continue  # it takes over before the end
        rates = [step.before.rates[0] for step in process.steps if step.before.rates]
        complete = run.planned.intersection((process.attempts, len(process.epochs)))  # else it may have stopped early
        if (found := [*_not_multiplied(run, process)]) or run.cut:
            return found
        if complete and (found := [*_wrong_length(run, process, rates)]):
            return found
        least = rates[-1] if rates and rates[-1] < 1e-3 * max(rates) else 0.0
        ended = len(list(takewhile(least.__eq__, reversed(rates))))
        if len(rates) >= 8 and ended > len(rates) // 5 and max(rates) > 0:
            seen = f"the learning rate is {least:.2g} in the last {ended} of {len(rates)} steps, and {max(rates):.2g} at most"
            where = next((event.where for event in process.of(ScheduleSeen)), process.step_where)
            return [_by_accelerate(run, process, Seen(seen, where, origin="total"))]
    return []


@rule(
    why="As soon as the schedule changes the learning rate of one rank only, the parameters of the ranks become different.",
    fix="Call the step() of the schedule on all ranks, with the same value: average the metric with all_reduce first.",
    needs=(ScheduleStepped,),
    after=(no_group, wrong_group, gradients_differ, weights_differ, monitor_differs),
    anywhere=True,
)
def schedules_differ(run: Run) -> Said:
    """Only some ranks call the ``step()`` of a schedule, or ReduceLROnPlateau gets a different value on each rank."""
    ranks = run.trained
    if len(ranks) < 2 or run.divided or of_its_own(run) or len({len(process.steps) for process in ranks}) > 1:
        return
    stepped = [_schedule_steps(process) for process in ranks]
    active = next((number for number, calls in enumerate(stepped) if calls), None)
    idle = next((process for process, calls in zip(ranks, stepped, strict=True) if not calls), None)
    if active is not None and idle:
        first = stepped[active][0]
        seen = f"{named(ranks[active])} calls the step() of {first.kind}, and {named(idle)} never does"
        yield Seen(seen, first.where, fix="Call the step() of the schedule on all ranks.", origin="gate here")
        return
    for first, *others in zip(*stepped, strict=False):
        for other in others:
            if first.metric is None or other.metric is None or first.where != other.where:
                return
            if abs(first.metric - other.metric) > CLOSE * abs(first.metric):
                seen = f"{first.kind} gets {first.metric:.4g} on one rank, and {other.metric:.4g} on another"
                yield Seen(seen, first.where)
                return


def _schedule_steps(process: Process) -> list[ScheduleStepped]:
    """The calls of ``step()`` before the last step, except those whose result is then sent to all ranks."""
    found: list[ScheduleStepped] = []
    open_calls: list[ScheduleStepped] = []
    for _, event in process.events:
        if isinstance(event, ScheduleStepped):
            open_calls.append(event)
        elif isinstance(event, Collective) and event.name.startswith("broadcast"):
            open_calls = []
        elif isinstance(event, StepBegun):
            found, open_calls = found + open_calls, []
    return found


def _by_accelerate(run: Run, process: Process, seen: Seen) -> Seen:
    """The same about a schedule that Accelerate prepares: the program has not multiplied its length by the processes."""
    given = [name for event in process.of(AcceleratorCalled) if event.name == "prepare" for name in event.of]
    name = next((name for name in given if name.endswith("LR")), "")
    if not name:
        return seen
    text = f"{seen.text}: Accelerate takes {run.nproc} steps of a prepared {name} for each step of the optimizer"
    lengths = "|".join(f"{name}.{each}" for each in LENGTHS)
    return replace(seen, text=text, fix=PREPARED, origin=f"length call:{lengths}|{name}")


def _wrong_length(run: Run, process: Process, rates: list[float]) -> Said:
    """The length of the schedule is wrong by the number of processes, or it counts epochs in place of steps."""
    for event in (each for each in process.of(ScheduleSeen) if each.taken):
        if seen := _in_wrong_unit(process, event):
            yield Seen(seen, event.where, fix=UNIT, origin="stepping returned:configure_optimizers")
            return
        share = event.length / event.taken
        if share > 1 and _planned(run, process, event.length):
            continue  # for more epochs, or steps, than one start takes
        if min(abs(share / run.nproc - 1), abs(share * run.nproc - 1)) < 0.15:
            seen = f"the schedule is made for {event.length} steps, but takes {event.taken}"
            times = f"{run.nproc} times too {'many' if share > 1 else 'few'}"
            often = (
                "stepping " if event.taken > 1.5 * process.attempts else ""
            )  # not once for each step of the optimizer
            found = Seen(f"{seen}: {times}", event.where, origin=f"{often}total")
            yield _by_accelerate(run, process, found) if share < 1 else found
            return
    length = 0 if process.first(ScheduleSeen) else _length(rates)
    if abs(length / len(process.steps) / run.nproc - 1) < 0.15:
        seen = f"the learning rate falls as in a schedule of {length} steps, but the run takes {len(process.steps)}"
        yield Seen(f"{seen}: {run.nproc} times too many", process.step_where, origin="total:by-hand")
    elif (low := _rises_again(rates)) and abs(low * run.nproc / len(rates) - 1) < 0.05:
        seen = f"the learning rate falls until step {low}, and rises again to {rates[-1]:.2g} after {len(rates)} steps"
        where = next((event.where for event in process.of(ScheduleSeen)), "")
        origin = "total" if where else "total:by-hand"
        yield Seen(f"{seen}: the schedule is {run.nproc} times too short", where or process.step_where, origin=origin)


def _rises_again(rates: list[float]) -> int:
    """The number of the step with the lowest rate, if the rates only fall before it and only rise after it; 0: they do not."""
    if len(rates) < 12 or min(rates) > 0.05 * max(rates) or rates[-1] < 0.5 * max(rates):
        return 0
    low = min(range(len(rates) // 4, len(rates)), key=rates.__getitem__)  # the first steps may be a warmup
    top = rates.index(max(rates[:low]))
    falls = all(one >= other for one, other in pairwise(rates[top : low + 1]))
    return low + 1 if falls and all(one <= other for one, other in pairwise(rates[low:])) else 0


def _planned(run: Run, process: Process, length: float) -> bool:
    """Whether an option names this number of steps of the optimizer, or of epochs that have so many steps."""
    loader = process.steps[0].loader
    batches = (
        next((each.length for each in process.of(LoaderStarted) if loader and each.loader == loader[0]), None) or 0
    )
    accumulated = max(1, round(len(process.backwards) / process.attempts))
    per_epoch = {batches // accumulated, -(-batches // accumulated)} - {0}
    return length in run.planned or any(length / steps in run.planned for steps in per_epoch)


def _not_multiplied(run: Run, process: Process) -> Said:
    """A prepared schedule takes a step for each process, but is made for the steps of the optimizer that the options name.

    The run is too short to show where the schedule ends, so its length must fit the number of epochs or steps of an option, and
    must not fit one if it is divided by the number of processes.
    """
    for event in process.of(ScheduleSeen):
        by_accelerate = event.taken and abs(event.taken / process.attempts / run.nproc - 1) < 0.05
        if (
            by_accelerate
            and _planned(run, process, event.length)
            and not _planned(run, process, event.length / run.nproc)
        ):
            seen = f"the schedule is made for {event.length} steps: {run.nproc} times too few"
            named_so = _by_accelerate(run, process, Seen(seen, event.where, origin="total"))
            if named_so.fix:
                yield named_so
                return


def _in_wrong_unit(process: Process, schedule: ScheduleSeen) -> str:
    """How a schedule is made for steps of the optimizer and advanced once per epoch, or the other way round."""
    attempts, epochs = process.attempts, len(process.epochs)
    for length, what, calls in ((attempts, "steps of the optimizer", epochs), (epochs, "epochs", attempts)):
        apart = max(attempts, epochs) > 3 * min(attempts, epochs)
        if apart and epochs > 1 and abs(schedule.length / length - 1) < 0.05 and abs(schedule.taken / calls - 1) < 0.05:
            return f"the schedule is made for {schedule.length} steps, the number of {what}, but takes {schedule.taken}"
    return ""


def _length(rates: list[float]) -> int:
    """The number of steps after which rates that the program sets itself would be 0, if they fall in a cosine or a line."""
    top = len(rates) - 1 - rates[::-1].index(max(rates, default=0)) if rates else 0
    fall = [rate / rates[top] for rate in rates[top:]] if rates and rates[top] > 0 else []
    if len(fall) < 12 or not all(0 < later < earlier for earlier, later in pairwise(fall)):
        return 0
    late = list(enumerate(fall))[len(fall) // 3 :]
    for lengths in ([n * math.pi / math.acos(2 * rate - 1) for n, rate in late], [n / (1 - rate) for n, rate in late]):
        if max(lengths) < 1.03 * min(lengths):
            return round(top + lengths[-1])
    return 0


@rule(
    why="Each improvement then counts as none: the learning rate falls, or the training ends, while the model gets better, and "
    "the worst model is kept as the best one.",
    fix='Pass mode="max" to ReduceLROnPlateau, or to the callback, for a metric that is better if it is larger, such as an '
    'accuracy, and mode="min" for a loss.',
    needs=(PlateauSeen,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def mode_reversed(run: Run) -> Said:
    """A schedule or a callback takes a smaller accuracy, or a larger loss, as an improvement."""
    for what, metric, mode, where, origin in _decides(run):
        parts = re.split(r"[^a-z0-9]+", metric.lower())
        larger, smaller = (any(map(each.fullmatch, parts)) for each in (LARGER, SMALLER))
        if larger != smaller and mode == ("min" if larger else "max"):
            yield Seen(f'{what} decides by `{metric}` with mode="{mode}"', where, origin=origin)
            return


def _decides(run: Run) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield what decides by a metric: its class, the name of the metric, the mode, the line, and the origin of the cause."""
    for process in run.ranks[:1]:
        for event in process.of(PlateauSeen):
            yield "ReduceLROnPlateau", event.metric, event.mode, event.where, "call:ReduceLROnPlateau"
        for seen in process.of(CallbacksSeen):
            for name, pairs in (("EarlyStopping", seen.stop), ("ModelCheckpoint", seen.best)):
                for metric, mode in pairs:
                    yield name, metric or "", mode, seen.where, f"call:{name}"
