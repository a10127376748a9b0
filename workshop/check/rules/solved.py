"""Whether a program trains with the settings of the solution of its exercise."""

from collections.abc import Iterator
from itertools import chain, islice

from workshop.check.evidence.misuses import OptimizerSeen
from workshop.check.evidence.run import Run
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import SOLVED, WHOLE


@rule(
    why="Then the exercise changes more than it is about, and its results cannot be compared with those of the course.",
    fix="Keep the optimizer and the batches of the program that the exercise begins with "
    "(./workshop.sh diff compares yours with the solution).",
    runs=(WHOLE, SOLVED),
    needs=(OptimizerSeen,),
    last=True,
)
def settings_differ(run: Run, solved: Run) -> Said:
    """The settings of the optimizer, the samples of a step or the number of steps are not those of the solution."""
    if not (run.failed or solved.failed) and run.trained and solved.trained:
        yield from islice(chain(_optimizers(run, solved), _batches(run, solved)), 1)


def _optimizers(run: Run, solved: Run) -> Iterator[Seen]:
    """Compare the optimizers. One with a different learning rate was chosen on purpose, and schedules also change momenta."""
    for own, other in zip(run.trained[0].of(OptimizerSeen), solved.trained[0].of(OptimizerSeen), strict=False):
        if own.rate != other.rate:
            continue
        if own.kind != other.kind:
            yield Seen(f"the optimizer is {own.kind}; that of the solution is {other.kind}", own.where)
        for name in sorted(own.settings.keys() & other.settings.keys()):
            one, two = own.settings[name], other.settings[name]
            if one != two:
                yield Seen(f"the optimizer has {name}={one}; that of the solution has {name}={two}", own.where)


def _batches(run: Run, solved: Run) -> Iterator[Seen]:
    """Compare the samples of the first step of all ranks together, and the number of steps."""
    one, two = (sum(len(process.steps[0].keys) for process in each.trained) for each in (run, solved))
    where = run.trained[0].data_where
    if one and two and one != two:
        yield Seen(
            f"a step trains with {plural(one, 'sample')} in all; that of the solution with {two}",
            where,
            origin="loader",
        )
    steps, others = (len(each.trained[0].steps) for each in (run, solved))
    if max(steps, others) > 1.5 * min(steps, others):  # a last, smaller batch of each epoch may be left out or not
        seen = f"the program takes {plural(steps, 'step')}; the solution takes {others} with the same options"
        yield Seen(seen, where, origin="loader")
