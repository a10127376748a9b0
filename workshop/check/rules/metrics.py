"""Whether the numbers that a program prints after an evaluation are those that one process prints."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from workshop.check.evidence.events import (
    A_NUMBER,
    AcceleratorCalled,
    Backward,
    Collective,
    Evaluated,
    Key,
    LossComputed,
    Printed,
    Sketch,
    StepTaken,
)
from workshop.check.evidence.misuses import OutputsShared, ResultDiscarded, TotalsSummed
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules.comparison import loss_weights_differ
from workshop.check.rules.evaluation import evaluation_missed, metric_of_one_rank
from workshop.check.rules.gradients import (
    buffers_differ,
    gradient_scale,
    gradients_differ,
    models_differ,
    weights_differ,
)
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import METRICS, Compared

SAME = 2e-4  # relative difference of numbers that the order of additions may explain
OUTLIER = 10  # a repeated sample may have a loss that is larger than the mean by this factor
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w]*\d)|\bnan\b|\binf\b")
HELD_OUT = re.compile(r"val|eval|test|dev\b|held", re.IGNORECASE)
METRIC = re.compile(
    r"acc|auc|f1|bleu|iou|dice|psnr|ssim|\bm?ap\b|hits|mrr|ndcg|top.?\d|ppl|perplex|recall|precis|\b[wce]er\b|rmse|\bmae\b|knn|thresh|quantile|median|score|\berr(?:or)?\b|\bmse\b|corr|\br2\b|nll",
    re.IGNORECASE,
)
MEAN = re.compile(r"loss|acc|\berr(?:or)?\b|\bmse\b|\bmae\b|nll", re.IGNORECASE)  # of the values of the samples
TRAINING = re.compile(r"train|\blr\b|rate|step|batch", re.IGNORECASE)
# That of the Trainer of transformers is the mean of the means of the batches, also with one process.
OF_TRAINER = re.compile(r"\b(eval|test)_loss\b")
LOSS = re.compile(r"loss|\blr\b|rate|norm|scale|seconds|time|/s\b", re.IGNORECASE)
AFTER = (
    loss_weights_differ,
    gradients_differ,
    weights_differ,
    models_differ,
    gradient_scale,
    buffers_differ,
    metric_of_one_rank,
    evaluation_missed,
)


@dataclass(frozen=True)
class Shown:
    """A text that rank 0 printed after an evaluation."""

    text: str
    where: str
    exchanged: (
        str  # the line of the first collective after the last forward pass, or else of one before it; "": there is none
    )
    steps: int  # before it
    evaluation: int  # its number; one process may take other steps between two evaluations
    gathered: str  # the line of the last Accelerator.gather() since the evaluation began; "" if there is none
    given: bool  # the evaluated parameters are those of the other run
    weights: list[Sketch]  # after the last step

    @property
    def form(self) -> str:
        """The text without its numbers."""
        return NUMBER.sub("#", self.text)


@rule(
    why="The number describes neither the model on all samples nor on those of one rank, and it changes with the number of "
    "processes.",
    fix="Add up the counts of all ranks with all_reduce, numerators and denominators, and divide after that. If a metric is no "
    "such ratio (AUC, F1, BLEU, a median), gather the outputs and labels of all ranks, and compute it from them.",
    runs=METRICS,
    needs=(Printed,),
    after=AFTER,
    anywhere=True,
)
def metric_depends_on_processes(compared: Compared) -> Said:
    """About the same parameters and samples, one process prints a different number."""
    pairs = list(_pairs(compared))
    if not pairs:
        yield NotJudged(f"{METRICS.title} (one process does not evaluate the same samples)", goal=False)
    for ours, alone in pairs:
        repeated = _repeated(compared, ours.evaluation)
        rounding = SAME + OUTLIER * repeated, SAME + 2 * repeated
        if seen := _different(ours, alone, compared.several.nproc, rounding, share=repeated):
            yield Seen(seen, ours.exchanged, detail=f"printed in {ours.where}", origin="exchanged")
            return


@rule(
    why="A prepared loader repeats samples so that all ranks have the same number, and these samples count twice in the metric.",
    fix="Call accelerator.gather_for_metrics() in place of gather() for the results of each batch: it drops repeated samples.",
    runs=METRICS,
    needs=(Printed, AcceleratorCalled),
    after=AFTER,
    instead_of=(metric_depends_on_processes,),
    anywhere=True,
)
def repeated_samples_gathered(compared: Compared) -> Said:
    """The program gathers the repeated samples of an evaluation, and prints a different number than one process."""
    pairs = [
        (ours, alone, share)
        for ours, alone in _pairs(compared)
        if ours.gathered and (share := _repeated(compared, ours.evaluation))
    ]
    for digits in (2.0, 0.6):  # a few samples change the last digit: then in most evaluations, as rounding does not
        found = [
            (seen, ours)
            for ours, alone, share in pairs
            if (seen := _different(ours, alone, compared.several.nproc, (SAME, SAME), digits))
            and not _different(ours, alone, compared.several.nproc, (math.inf, SAME + 2 * share), digits)
        ]
        if found and (digits > 1 or len(found) > max(1, len(pairs) // 2)):
            seen, ours = found[0]
            count = round(_repeated(compared, ours.evaluation) * _samples(compared.several)[ours.evaluation].total())
            yield Seen(f"gather() also returns {plural(count, 'repeated sample')}: {seen}", ours.gathered)
            return


@rule(
    why="The collective writes its result into the tensor that it gets. This one is a temporary copy, so the result is lost, and "
    "each rank goes on with its own values.",
    fix="Keep the copy in a variable, and use this variable after the call: total = total.clone(); dist.all_reduce(total).",
    needs=(ResultDiscarded,),
    after=(no_group, wrong_group),
    instead_of=(
        metric_depends_on_processes,
        repeated_samples_gathered,
        gradients_differ,
        weights_differ,
        buffers_differ,
    ),
    anywhere=True,
)
def result_discarded(run: Run) -> Said:
    """Ranks exchange different values in a tensor that ceases to exist in the same line. (Equal ones may be a barrier.)"""
    for together in zip(*map(_discarded, run.trained), strict=False):
        values = [each.value for each in together if each.value]
        if len(values) == len(together) > 1 and len({each.where for each in together}) == 1 and _apart(values):
            yield Seen(f"nothing reads the result of {together[0].name}()", together[0].where)
            return


def _discarded(process: Process) -> Iterator[ResultDiscarded]:
    """Yield the lost results since the training began. An exchange before it may only test the connections."""
    begun = False
    for _, event in process.events:
        begun = begun or isinstance(event, Backward | Evaluated)
        if begun and isinstance(event, ResultDiscarded):
            yield event


def _apart(values: list[Sketch]) -> bool:
    return any(difference(values[:1], [each]) > CLOSE for each in values[1:])


@rule(
    why="Each result overwrites the one before, so only the values of the last rank are left, once for each rank.",
    fix="Make a tensor for each rank: [torch.empty_like(x) for _ in range(world_size)]; [x] * world_size is one tensor, several "
    "times. Then call torch.distributed.all_gather().",
    needs=(OutputsShared,),
    after=(no_group, wrong_group),
    instead_of=(metric_depends_on_processes, gradients_differ, weights_differ),
    anywhere=True,
    origin="times",
)
def outputs_shared(run: Run) -> Said:
    """The list for the results of all ranks has the same tensor several times."""
    for event in run.all(OutputsShared):
        yield Seen(f"{event.name}() gets the same tensor for the results of several ranks", event.where)
        return


@rule(
    why="A total of all ranks that is summed over the ranks again multiplies everything that was counted before by their "
    "number, at each call: old values weigh more and more, and the count is wrong.",
    fix="Give all_reduce() only what is new since the last call, and add its result to the total. Or keep a total of this rank, "
    "and reduce a copy: everyone = own.clone(); dist.all_reduce(everyone).",
    needs=(TotalsSummed,),
    after=(no_group, wrong_group),
    anywhere=True,
)
def totals_summed_again(run: Run) -> Said:
    """On all ranks, an all_reduce gets its own last result again, with a little more."""
    found = [{each.where: each for each in process.of(TotalsSummed)} for process in run.trained]
    for where, each in found[0].items() if len(found) > 1 else ():
        if all(where in other for other in found[1:]):
            grows = f"in {each.calls} calls, a value grows from {each.first:g} to {each.last:g}"
            yield Seen(f"all_reduce() sums a total that is already the sum of all ranks: {grows}", where)


@rule(
    why="The loss in the log grows with the number of processes, and a threshold on it means something else on more GPUs.",
    fix="Divide the sum by the number of processes, or pass op=dist.ReduceOp.AVG to all_reduce.",
    needs=(Printed, LossComputed),
    after=(no_group, wrong_group),
    anywhere=True,
    origin="exchanged",
)
def loss_summed(run: Run) -> Said:
    """The program prints the sum of the losses of all ranks in a step, not their mean."""
    found = list(_printed_losses(run)) if len(run.trained) > 1 else []
    if len(found) > 1 and all(is_sum for _, _, is_sum in found):
        printed, where, _ = found[0]
        yield Seen(f"the program prints the loss {printed}, which is the sum of the losses of all ranks", where)


def _printed_losses(run: Run) -> Iterator[tuple[str, str, bool]]:
    """Yield the losses that rank 0 prints after it has reduced them, their reduction, and whether they are sums.

    Only those that are the sum or the mean of the losses of all ranks in the last backward pass, if each of these is a mean over
    the targets of a rank. (Otherwise their sum can be the mean over all targets.)
    """
    first, losses = run.trained[0], [_means(process) for process in run.trained]
    number, reduced = 0, ""
    for _, event in first.events:
        if isinstance(event, Backward):
            number, reduced = number + 1, ""
        elif isinstance(event, Collective) and "reduce" in event.name and event.shape in ((), (1,), None):
            reduced = event.where
        elif isinstance(event, Printed) and reduced and number:
            own = [each[number - 1] for each in losses if len(each) >= number]
            values = [value for value in own if value is not None]
            for label, printed in _labelled(event.text):
                total, value = sum(values), float(printed)
                close = [abs(value - each) <= max(SAME * abs(each), 0.6 * 10.0 ** -_digits(printed)) for each in
                         (total, total / max(1, len(values)))]  # fmt: skip
                if "loss" in label.lower() and len(values) == len(losses) and any(close):
                    yield printed, reduced, close[0]


def _means(process: Process) -> list[float | None]:
    """The loss of each backward pass, if it is the mean of a cross entropy; else None."""
    means: list[float | None] = []
    mean: float | None = None
    for _, event in process.events:
        if isinstance(event, LossComputed):
            mean = None if event.summed else event.mean
        elif isinstance(event, Backward):
            alike = mean is not None and event.loss is not None and math.isclose(event.loss, mean, rel_tol=SAME)
            means.append(event.loss if alike else None)
            mean = None
    return means


def _labelled(text: str) -> Iterator[tuple[str, str]]:
    """Yield the numbers with a decimal point in a text, each with the words before it."""
    begin, label = 0, ""
    for number in NUMBER.finditer(text):
        between = text[begin : number.start()]
        begin, label = number.end(), between if any(map(str.isalpha, between)) else label
        if "." in number[0]:
            yield label, number[0]


def _different(
    ours: Shown, alone: Shown, processes: int, rounding: tuple[float, float], digits: float = 2, share: float = 0
) -> str:
    """The first number of an evaluation that differs between two texts; "" if there is none. See ``_differ``.

    A repeated sample can add much to a mean, but not take much from it. Other metrics may change in both directions.
    ``share``: that of the repeated samples, by which shares of samples, such as an accuracy, may differ.
    """
    trained = difference(ours.weights, alone.weights) <= CLOSE
    for label, one, other in _numbers(ours.text, alone.text, trained):
        may = rounding if MEAN.search(label) else (rounding[0], rounding[0])
        whole = 100 if max(abs(float(one)), abs(float(other))) > 1 else 1
        if not LOSS.search(label) and abs(float(one) - float(other)) <= share * whole:
            continue
        if _differ(one, other, processes, may, digits):
            after = f"after step {ours.steps}" if ours.steps else "before the first step"
            return (
                f"{after} the program prints {label} {one}; one process with the same parameters and samples, {other}"
            )
    return ""


def prints_metrics(process: Process) -> bool:
    """Whether a process prints a number after an evaluation in which the ranks have exchanged values."""
    return any(each.exchanged and NUMBER.search(each.text) for each in _shown(process))


def _shown(process: Process) -> Iterator[Shown]:
    """Yield the texts that a process prints after an evaluation, without those that it prints between its batches too."""
    progress = _progress(process)
    for shown in _after_forwards(process):
        if (shown.evaluation, shown.form) not in progress:
            yield shown


def _progress(process: Process) -> set[tuple[int, str]]:
    """The forms of the texts that a process prints between two batches of a loader, with the number of the evaluation."""
    found: set[tuple[int, str]] = set()
    steps, last, printed = 0, None, list[str]()
    numbers: dict[int, int] = {}
    for _, event in process.events:
        if isinstance(event, Backward):
            last, printed = None, []
        elif isinstance(event, StepTaken):
            steps += 1
        elif isinstance(event, Evaluated):
            number, loader = numbers.setdefault(steps, len(numbers)), event.forward.loader
            if loader and loader == last:
                found.update((number, NUMBER.sub("#", text)) for text in printed)
            last, printed = loader, []
        elif isinstance(event, Printed):
            printed.append(event.text)
    return found


def _after_forwards(process: Process) -> Iterator[Shown]:
    evaluated, exchanged, gathered, steps, weights = False, "", "", 0, list[Sketch]()
    complete = False  # whether a collective has followed the last forward pass
    numbers: dict[int, int] = {}  # of the evaluations, by the steps before
    for _, event in process.events:
        if isinstance(event, Backward):
            evaluated, exchanged, gathered = False, "", ""
        elif isinstance(event, StepTaken):
            steps, weights = steps + 1, event.weights
        elif isinstance(event, Evaluated):
            evaluated, complete = True, False
            numbers.setdefault(steps, len(numbers))
        elif isinstance(event, Collective) and evaluated and "barrier" not in event.name and not event.inside:
            exchanged, complete = exchanged if complete else event.where, True
        elif isinstance(event, AcceleratorCalled) and event.name == "gather":
            gathered = event.where
        elif isinstance(event, Printed) and evaluated:
            number = numbers.get(steps, len(numbers) - 1)
            yield Shown(event.text, event.where, exchanged, steps, number, gathered, event.given, weights)


def _pairs(compared: Compared) -> Iterator[tuple[Shown, Shown]]:
    """Yield the texts that both runs print in the same form, in the same evaluation, about the same parameters and samples."""
    several, single = _samples(compared.several), _samples(compared.single)
    rest = iter(_shown(compared.single.trained[0]) if compared.single.trained else ())
    for ours in _shown(compared.several.trained[0]) if compared.several.trained else ():
        if not ours.exchanged:
            continue
        alone = next((each for each in rest if (each.form, each.evaluation) == (ours.form, ours.evaluation)), None)
        if alone is None:
            return
        of_all, of_one = several.get(ours.evaluation, Counter[Key]()), single.get(ours.evaluation, Counter[Key]())
        # If one process calls the model more often, it generates until the longest text of a larger batch is complete.
        alike = of_all.keys() == of_one.keys() != set() and of_one.total() <= of_all.total()
        if any(key[0] == A_NUMBER for key in of_one):  # equal numbers alone do not show that the samples are the same
            alike = of_one == of_all
        if ours.given and alone.given and alike:
            yield ours, alone


def _samples(run: Run, by_index: bool = False) -> dict[int, Counter[Key]]:
    """How often the ranks evaluate each sample, by the number of the evaluation.

    ``by_index``: equal samples with different indices are different ones, if the indices are known.
    """
    found: dict[int, Counter[Key]] = {}
    numbers: dict[int, int] = {}  # by the steps before, on the first rank
    for process in run.trained:
        # Before the training that all do together, one rank may train alone, for example a teacher.
        steps = len(run.trained[0].of(StepTaken)) - len(process.of(StepTaken))
        for _, event in process.events:
            steps += isinstance(event, StepTaken)
            if isinstance(event, Evaluated):
                samples = event.forward.keys if by_index else event.forward.rows
                number = (
                    numbers.setdefault(steps, len(numbers)) if process is run.trained[0] else numbers.get(steps, -1)
                )
                found.setdefault(number, Counter()).update(samples)
    return found


def _repeated(compared: Compared, evaluation: int) -> float:
    """The share of the evaluated samples that a sampler repeats, to give all ranks the same number."""
    counts = _samples(compared.several, by_index=True).get(evaluation, Counter[Key]())
    if any(key[0] == A_NUMBER for key in counts):
        return 0.0  # one process evaluates as many
    usual = min(counts.values(), default=1)
    return 1 - usual * len(counts) / max(1, counts.total())


def _numbers(one: str, other: str, trained: bool) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers of an evaluation in two texts of the same form, each with the words before it.

    If the trainings are not the same, these words must name a metric or held-out samples: other numbers can be losses of steps.
    """
    begin, held_out, label = 0, HELD_OUT.search(NUMBER.sub("", one)) is None, ""
    for ours, alone in zip(NUMBER.finditer(one), NUMBER.finditer(other), strict=True):
        between = one[begin : ours.start()]
        begin = ours.end()
        label = between if any(map(str.isalpha, between)) else label
        if HELD_OUT.search(label):
            held_out = True
        elif "train" in label.lower():
            held_out = False
        named = HELD_OUT.search(label) or METRIC.search(label) or (trained and not LOSS.search(label))
        named = named and not OF_TRAINER.search(label)
        if held_out and named and not TRAINING.search(label) and not between.endswith(":") and "." in ours[0]:
            yield label.strip(" ,;|([:='{\""), ours[0], alone[0]


def _differ(one: str, other: str, processes: int, rounding: tuple[float, float], digits: float = 2) -> bool:
    """Whether two numbers differ, relatively, by more than rounding, and not by the number of processes, as counts do.

    ``rounding``: if the first one is larger, and if it is smaller. ``digits``: they must also differ by more than this in
    the last digit.
    """
    ours, alone = float(one), float(other)
    may = rounding[abs(ours) < abs(alone)]
    if not abs(ours - alone) > max(may * max(abs(ours), abs(alone)), digits * 10.0 ** -_digits(one)):
        return False  # also if one of them is not a number
    factor = max(abs(ours), abs(alone)) / max(min(abs(ours), abs(alone)), 1e-12)
    return abs(factor / processes - 1) > SAME


def _digits(number: str) -> int:
    """The number of digits after the decimal point."""
    fraction = re.search(r"\.(\d*)(?:[eE]([-+]?\d+))?", number)
    return len(fraction[1]) - int(fraction[2] or 0) if fraction else 0
