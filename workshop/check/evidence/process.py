"""The events of one process of a run, and properties of them that the rules read."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from workshop.check.evidence.events import (
    Backward,
    Evaluated,
    Event,
    Forward,
    Joined,
    Key,
    Loader,
    LoaderStarted,
    StepBegun,
    StepSkipped,
    StepTaken,
    Trainer,
    Wrapped,
)
from workshop.check.evidence.misuses import LoaderMade
from workshop.check.evidence.reductions import NO_REDUCTIONS
from workshop.check.evidence.trail import NO_TRAIL

FEW = 3  # passes before steps that may be evaluations
E = TypeVar("E", bound=Event)


@dataclass
class Step:
    """One optimizer step."""

    seconds: float  # when it began
    before: StepBegun
    backwards: list[Backward]  # since the previous step
    identity: str = "keys"  # what identifies a sample, as in ``Process``
    after: StepTaken | None = None  # None: the run ended in the step
    skipped: list[Backward] = field(default_factory=list)  # of steps before it that a GradScaler has skipped

    @property
    def keys(self) -> list[Key]:
        """The samples that contribute to the step."""
        return [key for each in self.backwards if each.forward for key in each.forward.names(self.identity)]

    @property
    def rows(self) -> list[Key]:
        """The contents of these samples, as the model saw them."""
        return [row for each in self.backwards if each.forward for row in each.forward.rows]

    @property
    def loader(self) -> Loader | None:
        """The pass over a loader from which these samples come."""
        return next((each.forward.loader for each in self.backwards if each.forward), None)

    @property
    def random(self) -> int | None:
        """The random state at the start of the step."""
        return self.backwards[0].random if self.backwards else None


@dataclass
class Process:
    """The events of one process."""

    pid: int
    events: list[tuple[float, Event]]  # pairs (seconds, event) in order
    stdout: str = ""  # the first megabyte
    stderr: str = ""
    stack: str = ""  # the stack trace if the run hung; "" otherwise
    identity: str = "keys"  # what identifies a sample: "keys" (its index, if known) or "rows" (its content)
    ignored: frozenset[Trainer] = frozenset()  # those whose steps are left out, because only some ranks have them
    trail = NO_TRAIL  # in a second run whose lines are traced; not recorded, so it is no field
    reductions = NO_REDUCTIONS  # in a second run in which their results are noted
    replica = NO_TRAIL  # in a second run in which the changes of models are traced

    def of(self, kind: type[E]) -> list[E]:
        """The events of this kind, in order."""
        return [event for _, event in self.events if isinstance(event, kind)]

    def first(self, kind: type[E]) -> E | None:
        """The first event of this kind."""
        return next((event for _, event in self.events if isinstance(event, kind)), None)

    def timed(self, kind: type[E]) -> list[tuple[float, E]]:
        """The events of this kind, each with its time in seconds."""
        return [(seconds, event) for seconds, event in self.events if isinstance(event, kind)]

    def forget(self) -> None:
        """Forget what was computed with other settings."""
        for name in ("steps", "backwards", "optimizers", "epochs", "passes", "evaluations", "evaluated"):
            self.__dict__.pop(name, None)

    @cached_property
    def rank(self) -> int | None:
        """The rank in the group that the process joined last."""
        return next((joined.rank for joined in reversed(self.of(Joined))), None)

    @property
    def step_where(self) -> str:
        """The line of the first step."""
        return self.steps[0].before.where if self.steps else ""

    @cached_property
    def warmup(self) -> int:
        """The number of optimizer steps before a model is wrapped or sharded, which a program may take on each rank alike."""
        events = [event for _, event in self.events if isinstance(event, StepBegun | Wrapped)]
        return next((number for number, event in enumerate(events) if isinstance(event, Wrapped) or event.sharded), 0)

    @cached_property
    def steps(self) -> list[Step]:
        """The optimizer steps, each with the backward passes before it; not a warmup before a model is wrapped."""
        steps: list[Step] = []
        running: list[Step] = []  # that of ZeroRedundancyOptimizer, for example, contains the step of another optimizer
        backwards: list[Backward] = []
        skipped: list[Backward] = []
        for seconds, event in self.events:
            if isinstance(event, Backward):
                backwards.append(event)
            elif isinstance(event, StepSkipped):
                skipped, backwards = skipped + backwards, []
            elif isinstance(event, StepBegun):
                steps.append(Step(seconds, event, backwards, self.identity, skipped=skipped))
                running.append(steps[-1])
                backwards, skipped = [], []
            elif isinstance(event, StepTaken) and running:
                running.pop().after = event
        if self.warmup < len(steps):
            del steps[: self.warmup]
        # A library takes a first step without a backward pass to create the optimizer state: ignore it.
        while len(steps) > 1 and not steps[0].backwards and steps[1].backwards:
            del steps[0]
        self.trailing, self.skipped = backwards, skipped
        return [step for step in steps if step.before.trainer not in self.ignored]

    @cached_property
    def backwards(self) -> list[Backward]:
        """The backward passes of these steps, and those after the last step."""
        taken = [each for step in self.steps for each in (*step.skipped, *step.backwards)]
        return taken + self.skipped + self.trailing

    @property
    def attempts(self) -> int:
        """The number of steps, with those that a GradScaler has skipped."""
        return len(self.steps) + len(self.of(StepSkipped))

    @cached_property
    def optimizers(self) -> int:
        """How many optimizers take these steps."""
        return len({step.before.trainer for step in self.steps})

    @cached_property
    def epochs(self) -> list[list[Key]]:
        """The samples of each training epoch: a pass over a loader or, without a loader, until a sample repeats."""
        epochs: list[list[Key]] = []
        seen: set[Key] = set()
        loader = None
        for forward in (backward.forward for backward in self.backwards if backward.forward):
            keys = forward.names(self.identity)
            if not epochs or (forward.loader != loader if forward.loader else not seen.isdisjoint(keys)):
                epochs.append([])
                seen = set()
            loader = forward.loader
            epochs[-1].extend(keys)
            seen.update(keys)
        return epochs

    @cached_property
    def passes(self) -> dict[Loader, list[Key]]:
        """The samples of each pass over each loader that gives the training samples, by the number of the loader."""
        found: dict[Loader, list[Key]] = {}
        for backward in self.backwards:
            for forward in (backward.forward, *backward.others):
                if forward and forward.loader:
                    found.setdefault(forward.loader, []).extend(forward.names(self.identity))
        return dict(sorted(found.items()))

    @cached_property
    def evaluations(self) -> list[list[Key]]:
        """The evaluated samples, one list per evaluation between two steps."""
        named = ([name for names in phase.values() for name in names] for _, phase in self.evaluated)
        return [phase for phase in named if phase]

    @cached_property
    def evaluated(self) -> list[tuple[float, dict[Loader | None, list[Key]]]]:
        """The same for each iteration of a loader, with the time at which the evaluation ended.

        A teacher, or a generator, also sees the batch of the step, without a backward pass of its own: that is no evaluation,
        and neither is a pass over a batch before each step, for example for pseudo labels.
        """
        trained = {
            each.loader for backward in self.of(Backward) for each in (backward.forward, *backward.others) if each
        }
        phases: list[tuple[float, dict[Loader | None, list[Key]]]] = []
        phase: list[Forward] = []
        of_steps: list[int] = []  # the places of phases that are no larger than the batch of the step after them
        for seconds, event in [*self.events, (math.inf, None)]:
            if isinstance(event, Evaluated):
                phase.append(event.forward)
            elif event is None or isinstance(event, Backward):
                used = {*event.forward.names(self.identity)} if event and event.forward else set()
                own = [each for each in phase if each.loader is None or each.loader not in trained]
                phases.append((seconds, {}))
                for each in own:
                    if not used or not used.issuperset(each.names(self.identity)):
                        phases[-1][1].setdefault(each.loader, []).extend(each.names(self.identity))
                size = sum(map(len, phases[-1][1].values()))
                most = (
                    2 * len(used) if used else math.inf
                )  # without samples of the step, all could be those of a teacher
                if event and 0 < size <= most:
                    of_steps.append(len(phases) - 1)
                phase = []
        # Those of GANs are before every second backward pass.
        if len(of_steps) > max(FEW, 0.4 * (len(phases) - 1), 0.8 * (sum(bool(samples) for _, samples in phases) - 1)):
            return [each for number, each in enumerate(phases) if number not in of_steps]
        return phases

    @property
    def data_where(self) -> str:
        """The line of the first forward pass in training, where the data reach the model.

        If it is in a different file than the loop over the loader, such as that of a loss with a model inside: the loop.
        """
        line = next((backward.forward.where for backward in self.backwards if backward.forward), "")
        return self.loop_where if self.loop_where.rpartition(":")[0] != line.rpartition(":")[0] else line

    @property
    def loader_where(self) -> str:
        """The line that made the loader of the training samples, if it is known, or else where the data reach the model."""
        used = next((each.forward.loader for each in self.backwards if each.forward and each.forward.loader), None)
        made = (event.where for event in self.of(LoaderMade) if used and event.loader == used[0])
        return next(made, self.data_where)

    @property
    def loop_where(self) -> str:
        """The line of the first loop over the loader of the training samples, or else of the first forward pass."""
        first = next((backward.forward for backward in self.backwards if backward.forward), None)
        loops = (event.where for event in self.of(LoaderStarted) if first and _pass(event) == first.loader)
        return next(filter(None, loops), first.where if first else "")

    @property
    def draws(self) -> bool:
        """Whether the steps use the default random generator of torch, for example for dropout."""
        # Iterating over a loader draws once, so steps of the same iteration tell more.
        within = [
            one.random != other.random
            for one, other in pairwise(self.backwards)
            if one.forward and other.forward and one.forward.loader == other.forward.loader is not None
        ]
        states = [backward.random for backward in self.backwards]
        return (
            sum(within) > len(within) / 2 if len(within) > 1 else len(states) > 2 and len(set(states)) > len(states) / 2
        )


def _pass(event: LoaderStarted) -> Loader:
    return event.loader, event.iteration
