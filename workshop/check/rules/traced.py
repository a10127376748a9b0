"""One step of one process of a program of stage 06, as the rules about it read it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from workshop.check.evidence.events import Moment, StepTraced
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import ending
from workshop.check.rules.rule import NotJudged, Rule, Said, Seen, rule
from workshop.check.rules.words import named
from workshop.check.scenarios import BUILT_ALONE, WHOLE

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")
GATHERS = ("all_gather", "broadcast")
DIVIDED = 0.9  # of what one process stores: matrices of blocks, or experts, that the ranks divide among themselves
BIT = 0.1  # of what one process computes: what a rank may compute in addition to its share


def mib(size: float) -> str:
    """Write a number of bytes in MiB."""
    return f"{size / 2**20:.2f} MiB"


def size_of(calls: Iterable[Moment]) -> int:
    """The bytes that these calls send."""
    return sum(each.bytes for each in calls)


@dataclass(frozen=True)
class TracedStep:
    """What a process did in one step.

    Attributes:
        who: "rank 0".
        rank: its number.
        traced: the evidence.
        states: the bytes of the optimizer state of each rank.
        alone: the evidence of one process that trains alone; None if it did not end.
    """

    who: str
    rank: int
    traced: StepTraced
    states: list[int]
    alone: StepTraced | None

    @property
    def whole(self) -> int:
        """The bytes of all parameters."""
        return self.alone.parameters if self.alone else 0

    @property
    def held_alone(self) -> int:
        """The bytes that one process alone holds between two steps."""
        return self.alone.held if self.alone else 0

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return len(self.states)

    @property
    def spared(self) -> float:
        """How much less than one process this one stores between two steps; 1: all that other ranks can store for it."""
        if not self.alone or self.ranks == 1:
            return 1.0
        return (self.alone.held - self.traced.held) / ((1 - 1 / self.ranks) * DIVIDED * self.alone.held)

    @property
    def activation(self) -> int:
        """The bytes of the input of a block in one process; 0: the program has no blocks."""
        first = next((each for each in self.alone.moments if each.what == "forward"), None) if self.alone else None
        return first.bytes if first else 0

    @property
    def computed(self) -> float:
        """The matrix products of the forward pass, as a share of those of one process."""
        alone = _products(self.alone) if self.alone else 0
        return _products(self.traced) / alone if alone else 0.0

    @property
    def optimizer(self) -> str:
        """The line that created an optimizer."""
        return next(iter(self.traced.optimizers), "")

    def places(self, what: str) -> list[int]:
        """The positions of the moments of a kind: "forward" or "backward" is the beginning of this pass of a block."""
        return [place for place, each in enumerate(self.traced.moments) if each.what == what]

    def calls(self, *phases: str, names: Iterable[str] = COLLECTIVES) -> list[Moment]:
        """The calls of collectives, in some phases or in all of them."""
        chosen = [each for each in self.traced.moments if each.what == "call" and each.name in names]
        return [each for each in chosen if not phases or each.phase in phases]

    def gathers(self, *phases: str) -> list[Moment]:
        """The calls that gather parameters: those with the sizes of the forward pass."""
        sizes = {each.bytes for each in self.calls("forward", "", names=GATHERS)}
        return [each for each in self.calls(*phases, names=GATHERS) if each.bytes in sizes]

    def sums(self) -> list[Moment]:
        """The other calls of the backward pass, which communicate gradients."""
        gathers = {id(each) for each in self.gathers()}
        return [each for each in self.calls("backward") if id(each) not in gathers]

    def early(self, calls: list[Moment]) -> list[Moment]:
        """Those of some calls that begin before the backward pass reaches the first block, so that it can overlap with them."""
        before = {id(each) for each in self.traced.moments[: max(self.places("backward"), default=0)]}
        return [each for each in calls if each.phase == "backward" and id(each) in before]

    def under_way(self, place: int, names: Iterable[str] = COLLECTIVES) -> int:
        """How many calls have begun before a position, and were not waited for."""
        count = 0
        for each in self.traced.moments[:place]:
            if each.name in names:
                count = max(count + {"call": 1, "wait": -1}.get(each.what, 0), 0)
        return count

    def more(self, moment: Moment) -> int:
        """What the process holds at a moment in addition to what it holds between two steps."""
        return moment.held - self.traced.held

    def holds_most(self, what: str, limit: float) -> Moment | None:
        """The first moment of a kind, if the process then holds more than this share of all parameters."""
        begin = next((each for each in self.traced.moments if each.what == what), None)
        return begin if begin and self.more(begin) > limit * self.whole > 0 else None


def _products(traced: StepTraced) -> int:
    """The matrix products from the first to the last block of the forward pass, or of the whole step without blocks."""
    begins = [each.flops for each in traced.moments if each.what == "forward" and each.phase == "forward"]
    return begins[-1] - begins[0] if len(begins) > 1 else traced.flops


def steps_of(run: Run, alone: Run) -> list[TracedStep]:
    """The steps that were traced in a run; ``alone``: the run with one process."""
    first = next(alone.all(StepTraced), None)
    traced = [(process, event) for process in run.ranks for event in process.of(StepTraced)[:1]]
    states = [each.state for _, each in traced]
    return [TracedStep(named(process), process.rank or 0, event, states, first) for process, event in traced]


OfStep = Callable[[TracedStep], Seen | NotJudged | None]


def judging(function: OfStep) -> Callable[[Run, Run], Said]:
    """Return a function that asks about the step of each process until one shows something."""

    def judge(run: Run, alone: Run) -> Said:
        steps = steps_of(run, alone)
        if len(steps) < len(run.ranks) and not ending(run):
            yield NotJudged("what a step sends and holds: the program does not call Log.step() at the end of each step")
        yield from islice(filter(None, map(function, steps)), 1)

    judge.__name__, judge.__doc__, judge.__module__ = function.__name__, function.__doc__, function.__module__
    return judge


def needs_more(step: TracedStep, moment: Moment) -> str:
    """Write how much memory a process needs at a moment, in addition to what it always holds."""
    more, whole = mib(step.more(moment)), mib(step.whole)
    return f"{step.who} stores {more} more than between two steps; all parameters take {whole}"


def of_step(why: str, fix: str, after: tuple[Rule, ...] = ()) -> Callable[[OfStep], Rule]:
    """Declare a function of one step of one process as a rule."""
    declare = rule(why=why, fix=fix, runs=(WHOLE, BUILT_ALONE), needs=(StepTraced,), after=after)
    return lambda function: declare(judging(function))
