"""Whether each sample of the test set counts once, and the reported figures are those of all samples on all ranks."""

import itertools
from collections import Counter

from workshop.check.evidence.events import Backward, Evaluated, LoaderStarted, Reported
from workshop.check.evidence.run import Run, Step
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.scenarios import WHOLE

EXACT = 1e-6  # a reported accuracy that is further from the true one is wrong
METRIC = 1e-4  # the same for other metrics


def _first_counts(run: Run) -> tuple[Counter[tuple[object, ...]], int, str]:
    """How often each sample is evaluated the first time, by how many ranks, and where."""
    ranks = [process for process in run.ranks if process.evaluations]
    phases = list(zip(*(process.evaluations for process in ranks), strict=False))
    if not phases:
        return Counter(), 0, ""
    event = ranks[0].first(Evaluated)
    return Counter(key for part in phases[0] for key in part), len(ranks), event.where if event else ""


@rule(
    why="The figure is that of fewer samples than it claims.",
    fix="Evaluate the whole test set: give each rank a different part of it (Subset(test_set, range(rank, len(test_set), "
    "world_size))), without drop_last.",
    runs=WHOLE,
    needs=(Evaluated, Backward),
    after=(no_group, wrong_group),
)
def evaluation_missed(run: Run) -> Said:
    """Samples of the test set are evaluated by no rank."""
    counts, _, where = _first_counts(run)
    names = {key[:2] for key in counts if key[0] != "content"}
    if len(names) != 1 or run.failed:
        return
    size = int(str(next(iter(names))[1]))
    trained = any(key[:2] in names for process in run.ranks for epoch in process.epochs for key in epoch)
    if len(counts) < size and not trained:
        yield Seen(f"{size - len(counts):,} of the {size:,} test samples are evaluated by no rank", where)


@rule(
    why="Samples that count twice change the figure, or cost time for nothing.",
    fix="Give each rank a different part of the test set. DistributedSampler repeats samples at the end so that all ranks have "
    "the same number: use Subset(test_set, range(rank, len(test_set), world_size)), or remove the repeated ones.",
    runs=WHOLE,
    needs=(Evaluated, Reported),
    after=(no_group, wrong_group, evaluation_missed),
)
def evaluation_repeated(run: Run) -> Said:
    """Samples of the test set are evaluated more than once."""
    counts, ranks, where = _first_counts(run)
    twice = sum(1 for count in counts.values() if count > 1)
    if not twice or ranks < 2 or run.failed:
        return
    if twice == len(counts):
        yield Seen(f"each of the {twice:,} test samples is evaluated by {max(counts.values())} ranks", where)
    elif not _accuracy_is_exact(run):  # a program that removes what was added counts each sample once
        yield Seen(f"{twice:,} of the {len(counts):,} test samples count twice", where)


def _accuracy_is_exact(run: Run) -> bool:
    reports = [event for event in run.all(Reported) if "accuracy" in event.truth]
    return bool(reports) and all(
        event.accuracy is not None and abs(event.accuracy - event.truth["accuracy"]) < EXACT for event in reports
    )


# ---------------------------------------------------------------- reported figures


@rule(
    why="The reported figure is not the one of all samples on all ranks.",
    fix="Sum the counts over all ranks with all_reduce, then compute the metric from the sums; average losses with "
    "ReduceOp.AVG; multiply one rank's samples per second by the number of processes.",
    runs=WHOLE,
    needs=(Reported,),
    after=(no_group, wrong_group),
)
def metric_wrong(run: Run) -> Said:
    """The metric that the exercise asks for is not reported at all."""
    if run.asked and run.asked.metric and run.trained and not _reports_metric(run):
        where = next((event.where for event in run.all(Reported)), "")
        yield Seen(f"no {run.asked.metric} is given to log.write()", where)


def _reports_metric(run: Run) -> bool:
    name = run.asked.metric if run.asked else ""
    return any(
        event.accuracy is not None if name == "accuracy" else name in event.metrics for event in run.all(Reported)
    )


@metric_wrong.also(WHOLE, needs=(Reported, LoaderStarted), after=(no_group, wrong_group), figures=True)
def figure_is_not_the_true_one(run: Run) -> Said:
    """A reported figure is not that of all samples and all ranks."""
    reports = list(run.all(Reported))
    if not reports or not _reports_metric(run):
        return
    if reports[0].failed:
        yield NotJudged(f"the reported figures ({reports[0].failed})", goal=False)
    seen = _accuracy(reports) or _metric(reports) or _losses(run, reports) or _throughput(run, reports)
    if seen:
        yield Seen(seen, reports[0].where)


def _accuracy(reports: list[Reported]) -> str:
    for each in reports:
        true = each.truth.get("accuracy")
        if true is not None and each.accuracy is not None and abs(each.accuracy - true) > EXACT:
            over = f"over all {each.samples:,} test samples it is {true:.2%}"
            return f"the accuracy is reported as {each.accuracy:.2%}; {over}"
    return ""


def _metric(reports: list[Reported]) -> str:
    for each in reports:
        for name, value in each.metrics.items():
            true = each.truth.get(name)
            if true is not None and abs(value - true) > METRIC:
                over = f"over all {each.samples:,} test samples it is {true:.4f}"
                return f"the {name.replace('_', ' ')} is reported as {value:.4f}; {over}"
    return ""


def _losses(run: Run, reports: list[Reported]) -> str:
    """The loss of each step has to be the mean over all ranks."""
    true = []
    for together in zip(*(process.steps for process in run.trained), strict=False):
        per_rank = [[each.loss for each in step.backwards if each.loss is not None] for step in together]
        if not all(per_rank):
            return ""
        true.append(sum(map(sum, per_rank)) / len(per_rank))
    reported = [loss for each in reports for loss in each.losses]
    if not true or len(true) != len(reported):
        return ""
    # A program that divides the gradients, and not the loss, reports the mean of its batches.
    for factor in {1, 1 / run.accumulate}:
        if all(abs(a * factor - b) <= 0.01 * max(abs(b), 0.02) for a, b in zip(true, reported, strict=True)):
            return ""
    worst = max(range(len(true)), key=lambda i: abs(true[i] - reported[i]) / max(abs(true[i]), 1e-3))
    mean = f"the mean over all ranks is {true[worst]:.4f}"
    return f"the loss of step {worst + 1} is reported as {reported[worst]:.4f}; {mean}"


def _throughput(run: Run, reports: list[Reported]) -> str:
    """The reported samples per second have to be those of all processes together."""
    if not run.trained:
        return ""
    base = run.trained[0]
    starts = [seconds for seconds, _ in base.timed(LoaderStarted)]
    ratios = []
    for report, steps in zip(reports, _epochs_of_steps(base.steps), strict=False):
        begin = max((seconds for seconds in starts if seconds <= steps[0].seconds), default=None)
        if begin is None or len(steps) < 2:
            return ""
        samples = sum(len(step.keys) for step in steps) * len(run.trained)
        ratios.append(report.samples_per_second / (samples / (steps[-1].seconds - begin)))
    if not ratios or (max(ratios) >= 0.66 and min(ratios) <= 1.6):
        return ""
    middle = sorted(ratios)[len(ratios) // 2]
    hint = " (about one rank's)" if abs(middle - 1 / run.nproc) < 0.15 and run.nproc > 1 else ""
    return f"the reported samples per second are {middle:.2f} times those of all {run.nproc} processes together{hint}"


def _epochs_of_steps(steps: list[Step]) -> list[list[Step]]:
    """The steps of each pass over a loader."""

    def loader(step: Step) -> object:
        forward = step.backwards[-1].forward if step.backwards else None
        return forward.loader if forward else None

    return [list(group) for _, group in itertools.groupby(steps, key=loader)]
