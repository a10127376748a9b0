"""Whether each sample of the test set counts once, and the reported figures are those of all samples on all ranks."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

from workshop.check.evidence.events import (
    AcceleratorCalled,
    Backward,
    Collective,
    Evaluated,
    Key,
    Loader,
    LoaderStarted,
    Reported,
)
from workshop.check.evidence.misuses import MetricKept, NothingDropped, PassEnded
from workshop.check.evidence.process import Process
from workshop.check.evidence.real import RealRun
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import crash
from workshop.check.rules.exchanges import exchanged
from workshop.check.rules.gradients import gradients_differ, weights_differ
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.rules.shares import plays
from workshop.check.rules.words import plural
from workshop.check.scenarios import SPAWNED, WHOLE

EXACT = 1e-6  # a reported accuracy that is further from the true one is wrong
METRIC = 1e-4  # the same for other metrics
MANY = 64  # samples that a game does not repeat: they depend on what the model does


def _first_counts(run: Run) -> tuple[Counter[tuple[object, ...]], int]:
    """How many ranks evaluate each sample the first time, and how many ranks evaluate. One rank can use a sample in two ways."""
    ranks = [process for process in run.ranks if process.evaluations]
    return Counter(key for process in ranks for key in set(process.evaluations[0])), len(ranks)


def _only_before(run: Run) -> bool:
    """Whether all evaluations are before the first step: a program may call its model once to make its layers."""
    return all(seconds < process.steps[0].seconds for process in run.trained for seconds, _ in process.timed(Evaluated))


@rule(
    why="The reported metric does not cover all test samples.",
    fix="Give each rank a part of the test set, without drop_last: Subset(test_set, range(rank, len(test_set), world_size)).",
    after=(no_group, wrong_group),
    mild=True,
    anywhere=True,
    origin="loader:evaluation",
)
def evaluation_missed(run: Run) -> Said:
    """Samples of the test set are evaluated by no rank."""
    counts, _ = _first_counts(run)
    names = {key[:2] for key in counts if key[0] != "content"}
    if len(names) != 1 or run.failed or run.divided or any(_between_steps(process) - {None} for process in run.ranks):
        return
    size = int(str(next(iter(names))[1]))
    trained = any(key[:2] in names for process in run.ranks for epoch in process.epochs for key in epoch)
    if len(counts) < size and not trained:
        yield Seen(f"no rank evaluates {size - len(counts):,} of the {size:,} test samples", run.where(Evaluated))


@rule(
    why="The samples of the last batch count in no metric, and how many these are depends on the number of processes.",
    fix="Leave out drop_last=True in the DataLoader of an evaluation; dataloader_drop_last of TrainingArguments also sets it.",
    needs=(PassEnded,),
    after=(no_group, wrong_group),
    instead_of=(evaluation_missed,),
    anywhere=True,
    origin="text:dataloader_drop_last=True loader:evaluation",
)
def last_batch_dropped(run: Run) -> Said:
    """The ranks evaluate whole passes over a loader that drops its last, incomplete batch."""
    ranks = [passes for passes in map(_passes, run.ranks) if passes]
    if run.failed or run.divided or not ranks:
        return
    trained = {key[:2] for process in run.ranks for epoch in process.epochs for key in epoch}
    for name in sorted(set.intersection(*map(set, ranks)) - trained, key=str):
        sizes = [size for passes in ranks for size in passes[name].sizes]
        seen = set[Key]().union(*(passes[name].keys for passes in ranks))
        missing = int(str(name[1])) - len(seen)
        # (A DistributedSampler may leave out less than one sample for each rank.)
        if len(set(sizes)) == 1 and len(ranks) <= missing < len(ranks) * sizes[0]:
            text = (
                f"no rank evaluates {missing:,} of the {int(str(name[1])):,} samples, because the last batch is dropped"
            )
            yield Seen(text, ranks[0][name].where)
            return


def _between_steps(process: Process) -> set[Loader | None]:
    """The passes over loaders whose batches go through a model without gradients, such as a frozen encoder, before each step."""
    found: set[Loader | None] = set()
    before: set[Loader | None] = set()  # until the last backward pass
    evaluated: set[Loader | None] = set()
    for _, event in process.events:
        if isinstance(event, Backward):
            before |= evaluated
        elif isinstance(event, Evaluated):
            evaluated.add(event.forward.loader)
            found |= {event.forward.loader} & before
    return found


@dataclass
class _Pass:
    """The first whole pass over a loader in which a rank evaluates samples of a data set."""

    loader: Loader
    where: str
    sizes: list[int] = field(default_factory=list)  # of its batches
    keys: set[Key] = field(default_factory=set)


def _passes(process: Process) -> dict[Key, _Pass]:
    """These passes, by the name and the size of the data set."""
    complete = {event.loader for event in process.of(NothingDropped)}
    whole = {(event.loader, event.iteration) for event in process.of(PassEnded) if event.loader not in complete}
    whole -= _between_steps(process)
    found: dict[Key, _Pass] = {}
    for event in process.of(Evaluated):
        keys, loader = event.forward.names(process.identity), event.forward.loader
        if loader in whole and keys and keys[0][0] != "content" and isinstance(keys[0][1], int):
            each = found.setdefault(keys[0][:2], _Pass(loader, event.where))
            if each.loader == loader:
                each.sizes.append(len(keys))
                each.keys.update(keys)
    return found


@rule(
    why="Repeated samples change the metric, or cost time without any benefit.",
    fix="Use Subset(test_set, range(rank, len(test_set), world_size)), or remove the samples that DistributedSampler repeats.",
    needs=(Reported,),
    after=(no_group, wrong_group, evaluation_missed),
    mild=True,  # each rank may evaluate the whole set
    anywhere=True,
    origin="loader:evaluation",
)
def evaluation_repeated(run: Run) -> Said:
    """Samples of the test set are evaluated more than once."""
    counts, ranks = _first_counts(run)
    twice = sum(1 for count in counts.values() if count > 1)
    if not twice or ranks < 2 or run.failed or run.divided:
        return
    if run.asked is None and any("gather" in event.name for event in run.all(Collective)):
        return  # it may remove the repeated samples after it has gathered them, as gather_for_metrics() does
    # Samples without an index may be parts of samples, or different ones that are equal.
    unnamed = any(key[0] == "content" for key in counts)
    if unnamed and run.asked is None and (twice < len(counts) or any(map(plays, run.trained)) or _only_before(run)):
        return
    figures = [(event.accuracy, event.truth["accuracy"]) for event in run.all(Reported) if "accuracy" in event.truth]
    exact = figures and all(one is not None and abs(one - true) < EXACT for one, true in figures)
    if twice == len(counts):
        yield Seen(f"{max(counts.values())} ranks evaluate each of the {twice:,} test samples", run.where(Evaluated))
    elif not exact:  # a program that removes the repeated samples counts each once
        yield Seen(f"{twice:,} of the {len(counts):,} test samples count twice", run.where(Evaluated))


@rule(
    why="The reported metric does not cover all test samples.",
    fix="Sum the counts over all ranks with all_reduce, and compute the metric from these sums.",
    needs=(Reported,),
    after=(no_group, wrong_group),
)
def metric_wrong(run: Run) -> Said:
    """The metric that the exercise asks for is not reported at all."""
    name = run.asked.metric if run.asked else ""
    if name and run.trained and not any(name in _figures(event) for event in run.all(Reported)):
        yield Seen(f"no {name} is given to log.write()", run.where(Reported))


def _figures(report: Reported) -> dict[str, float]:
    """The figures of the model that are reported, by name."""
    return report.metrics if report.accuracy is None else {"accuracy": report.accuracy, **report.metrics}


@metric_wrong.also(WHOLE, needs=(Reported,), after=(no_group, wrong_group, gradients_differ, weights_differ))
def metric_is_not_the_true_one(run: Run) -> Said:
    """A reported metric is not that of the model on all test samples."""
    reports = list(run.all(Reported))
    if any(metric_wrong.detectors[0].function(run)):
        return  # a missing metric comes first
    if reports and reports[0].failed:
        yield NotJudged(f"the reported figures ({reports[0].failed})", goal=False)
    figure, seen = _metric(reports)
    if seen:
        yield Seen(seen, reports[0].where, origin=f"logged:{figure} figure:{figure}")


@rule(
    why="Each rank computes the metric of its own part, so printed values and decisions based on them differ between ranks.",
    fix="Sum the counts over all ranks with all_reduce, then compute the metric; in Lightning: self.log(..., sync_dist=True).",
    after=(no_group, wrong_group),
    anywhere=True,
)
def metric_of_one_rank(run: Run) -> Said:
    """Each rank evaluates its own part of a data set, and no collective follows before the next step."""
    parts = [process.evaluations[0] if process.evaluations else [] for process in run.ranks]
    if len(parts) < 2 or not all(parts) or run.failed or run.divided:
        return
    # A DistributedSampler repeats samples, so that all ranks have as many; Accelerate repeats whole batches. Two may be equal.
    common, least = len(set.intersection(*map(set, parts))), min(map(len, parts))
    prepared = any(event.name == "prepare" for event in run.all(AcceleratorCalled))
    if (common >= max(run.nproc, least / 100) and not prepared) or 4 * common >= least:
        return
    from_loader = any(map(_from_a_loader, run.ranks))
    if any(exchanged(process) for process in run.ranks) or not (from_loader or all(map(_of_a_set, run.ranks))):
        return
    shown = " and ".join(f"{len(set(part)):,}" for part in parts[:4])
    seen = f"the ranks evaluate {shown} different samples, and no collective adds up the results"
    # One rank alone may also use samples, for pictures.
    lines = set.intersection(*({event.where for event in process.of(Evaluated)} for process in run.ranks))
    where = next((event.where for event in run.all(Evaluated) if event.where in lines), run.where(Evaluated))
    yield Seen(seen, where, origin="without-gradients")


def _from_a_loader(process: Process) -> bool:
    """Whether the evaluated samples come from a loader that no step uses."""
    trained = {each.forward.loader for each in process.of(Backward) if each.forward}
    return any(each.forward.loader and each.forward.loader not in trained for each in process.of(Evaluated))


def _of_a_set(process: Process) -> bool:
    """Whether the evaluations have the same samples, many of them or such as no step trains on: they are none of a game."""
    first, *others = map(set, process.evaluations)
    trained = {key for epoch in process.epochs for key in epoch}
    # If the program calls the layers of the model itself, then the samples of the later layers change with its parameters.
    many = all(3 * len(each & first) > len(first) > MANY for each in others)
    return bool(others) and (many or (all(each == first for each in others) and not first & trained))


@rule(
    why="The log does not show the training of all ranks together.",
    fix="Average the losses with all_reduce and ReduceOp.AVG; count the samples of all batches of a step, on all ranks.",
    needs=(Reported,),
    after=(no_group, wrong_group),
    figures=True,
)
def log_wrong(run: Run) -> Said:
    """A reported loss is not the mean over all ranks, or the samples per second are not those of all ranks."""
    reports = list(run.all(Reported))
    if seen := _losses(run, reports):
        yield Seen(seen, reports[0].where, origin="figure:losses")
    elif seen := _throughput(run, reports):
        yield Seen(seen, reports[0].where, origin="figure:samples_per_second")


@log_wrong.also(SPAWNED, after=(crash,))
def number_of_processes_is_wrong(run: RealRun) -> Said:
    """The log names a different number of processes than 2, the number that the check asks for."""
    if run.processes and set(run.processes) != {2} and not any(run.statuses):
        yield Seen(
            f"2 processes train, but the log says {run.processes[0]}: call EpochLog(..., processes=world_size)",
            origin="call:EpochLog",
        )


def _metric(reports: list[Reported]) -> tuple[str, str]:
    """A reported figure that is not the true one, and how it differs; "" if there is none."""
    for each in reports:
        for name, value in _figures(each).items():
            exact, digits = (EXACT, ".2%") if name == "accuracy" else (METRIC, ".4f")
            true = each.truth.get(name, value)
            if abs(value - true) > exact:
                over = f"over all {each.samples:,} test samples it is {true:{digits}}"
                return name, f"the {name.replace('_', ' ')} is reported as {value:{digits}}; {over}"
    return "", ""


def _losses(run: Run, reports: list[Reported]) -> str:
    """How a reported loss differs from the mean over all ranks."""
    true = []
    for together in zip(*(process.steps for process in run.trained), strict=False):
        per_rank = [[each.loss for each in step.backwards if each.loss is not None] for step in together]
        if all(per_rank):
            true.append(sum(map(sum, per_rank)) / len(per_rank))
    reported = [loss for each in reports for loss in each.losses]
    if len(true) != len(reported):
        return ""
    # A program that divides the gradients, and not the loss, reports the mean of its batches.
    for factor in {1, 1 / run.accumulate}:
        pairs = zip(true, reported, strict=True)
        if all(
            abs(a * factor - b) <= 0.01 * max(abs(b), 0.02) or (a != a and b != b) for a, b in pairs
        ):  # NaN is not NaN
            return ""
    worst = max(range(len(true)), key=lambda i: abs(true[i] - reported[i]) / max(abs(true[i]), 1e-3))
    return f"the loss of step {worst + 1} is reported as {reported[worst]:.4f}; the mean over all ranks is {true[worst]:.4f}"


def _throughput(run: Run, reports: list[Reported]) -> str:
    """How the reported samples per second differ from those of all processes together."""
    ratios = []
    for process in run.trained[:1]:
        starts = [seconds for seconds, _ in process.timed(LoaderStarted)]
        loaders = [[each.forward and each.forward.loader for each in step.backwards[-1:]] for step in process.steps]
        epochs = itertools.groupby(zip(loaders, process.steps, strict=True), key=lambda pair: pair[0])
        for report, (_, group) in zip(reports, epochs, strict=False):
            steps = [step for _, step in group]
            begin = max((seconds for seconds in starts if seconds <= steps[0].seconds), default=None)
            if begin is None or len(steps) < 2:
                return ""
            samples = sum(len(step.keys) for step in steps) * len(run.trained)
            ratios.append(report.samples_per_second / (samples / (steps[-1].seconds - begin)))
    if not ratios or (max(ratios) >= 0.66 and min(ratios) <= 1.6):
        return ""
    middle = sorted(ratios)[len(ratios) // 2]
    counted = {"those of one rank": run.nproc, "those of one batch per step": run.accumulate}
    near = {what: abs(middle * count - 1) for what, count in counted.items() if count > 1}
    what = min(near, key=lambda each: near[each], default="")
    hint = f" (about {what})" if what and near[what] < 0.2 else ""
    return f"the reported samples per second are {middle:.2f} times those of all {run.nproc} processes together{hint}"


@rule(
    why="The value is that of all evaluations so far: it changes more slowly than the model, the best checkpoint is chosen by "
    "it, and after a resume, which begins with an empty metric, it is another one.",
    fix="Call reset() of the metric after compute(). A LightningModule resets it if you log the object itself, as in "
    'self.log("acc", self.acc).',
    needs=(MetricKept,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def metric_not_reset(run: Run) -> Said:
    """A metric of torchmetrics is computed after a second evaluation, and still has the samples of the first one."""
    for event in run.trained[0].of(MetricKept)[:1] if run.trained else ():
        updates = f"it has {plural(event.updates, 'batch')}, of which {event.before} are of earlier evaluations"
        yield Seen(f"{event.metric} is computed without a reset since the evaluation before: {updates}", event.where)
