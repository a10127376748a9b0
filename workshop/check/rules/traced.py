"""One step of one process of a program of stage 06, as the rules about it read it."""

from collections.abc import Iterable
from dataclasses import dataclass

from workshop.check.evidence.events import Moment, StepTraced
from workshop.check.evidence.run import Run
from workshop.check.rules.words import named

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
GATHERS = ("all_gather", "broadcast")


def size_of(calls: Iterable[Moment]) -> int:
    """The bytes that these calls send."""
    return sum(each.bytes for each in calls)


@dataclass(frozen=True)
class TracedStep:
    """What a process did in one step.

    Attributes:
        who: "rank 0".
        traced: the evidence.
        states: the bytes of the optimizer state of each rank.
        whole: the bytes of all parameters.
        held_alone: the bytes that one process alone holds between two steps.
    """

    who: str
    traced: StepTraced
    states: list[int]
    whole: int
    held_alone: int

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return len(self.states)

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


def steps_of(run: Run, alone: Run) -> list[TracedStep]:
    """The steps that were traced in a run; ``alone``: the run with one process."""
    first = next(alone.all(StepTraced), None)
    whole, held = (first.parameters, first.held) if first else (0, 0)
    traced = [(process, event) for process in run.ranks for event in process.of(StepTraced)[:1]]
    return [
        TracedStep(named(process), event, [each.state for _, each in traced], whole, held) for process, event in traced
    ]
