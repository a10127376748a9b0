"""What a run left: the events of each of its processes, and questions that the rules ask of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from workshop.check.evidence.events import (
    Backward,
    Evaluated,
    Event,
    Exited,
    FileWritten,
    Joined,
    Key,
    Raised,
    StepBegun,
    StepTaken,
    WroteOutside,
)
from workshop.run.failures import is_echo

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Asked:
    """What the check asked a program for that it knows: an exercise."""

    epochs: int | None = None  # None: the program counts steps
    accumulate: int = 1  # batches per step
    metric: str = ""  # what it has to report: "accuracy" or a further figure of the log; "": nothing
    images: tuple[int, int, int] | None = None  # channels, height and width that its model is for; None: any
    validation_loss: float | None = None  # of a language model before the training, in nats, by transformers alone


@dataclass
class Step:
    """One optimizer step."""

    seconds: float  # when it began
    before: StepBegun
    backwards: list[Backward]  # since the step before
    identity: str = "keys"  # what names a sample, as in ``Process``
    after: StepTaken | None = None  # None: the run ended in the step

    @property
    def keys(self) -> list[Key]:
        """The samples of its gradients."""
        return [key for each in self.backwards if each.forward for key in each.forward.names(self.identity)]

    @property
    def rows(self) -> list[Key]:
        """The contents of these samples, as the model saw them."""
        return [row for each in self.backwards if each.forward for row in each.forward.rows]

    @property
    def random(self) -> int | None:
        """The random state that the step begins with."""
        return self.backwards[0].random if self.backwards else None


@dataclass
class Process:
    """The events of one process."""

    pid: int
    events: list[tuple[float, Event]]  # pairs (seconds, event) in order
    stdout: str = ""  # the first megabyte
    stderr: str = ""
    stack: str = ""  # the lines of the stack when the run hung; "" otherwise
    identity: str = "keys"  # what names a sample: "keys" (its index in the data set, if known) or "rows" (its content)

    def of(self, kind: type[E]) -> list[E]:
        """The events of this kind, in order."""
        return [event for _, event in self.events if isinstance(event, kind)]

    def first(self, kind: type[E]) -> E | None:
        """The first event of this kind."""
        return next((event for _, event in self.events if isinstance(event, kind)), None)

    def timed(self, kind: type[E]) -> list[tuple[float, E]]:
        """The events of this kind, each with its time in seconds."""
        return [(seconds, event) for seconds, event in self.events if isinstance(event, kind)]

    @cached_property
    def rank(self) -> int | None:
        """Its rank in the group that it joined last."""
        return next((joined.rank for joined in reversed(self.of(Joined))), None)

    @property
    def step_where(self) -> str:
        """The line of its first step."""
        return self.steps[0].before.where if self.steps else ""

    @cached_property
    def steps(self) -> list[Step]:
        """The optimizer steps, each with the backward passes before it."""
        steps: list[Step] = []
        backwards: list[Backward] = []
        for seconds, event in self.events:
            if isinstance(event, Backward):
                backwards.append(event)
            elif isinstance(event, StepBegun):
                steps.append(Step(seconds, event, backwards, self.identity))
                backwards = []
            elif isinstance(event, StepTaken) and steps:
                steps[-1].after = event
        # A step without a backward before the first one is a library's, which creates the optimizer's state by it.
        while len(steps) > 1 and not steps[0].backwards and steps[1].backwards:
            del steps[0]
        return steps

    @cached_property
    def epochs(self) -> list[list[Key]]:
        """The samples trained on, for each pass over a loader (or, without one, until a sample comes again)."""
        epochs: list[list[Key]] = []
        seen: set[Key] = set()
        loader = None
        for forward in (backward.forward for backward in self.of(Backward) if backward.forward):
            keys = forward.names(self.identity)
            if not epochs or (forward.loader != loader if forward.loader else not seen.isdisjoint(keys)):
                epochs.append([])
                seen = set()
            loader = forward.loader
            epochs[-1].extend(keys)
            seen.update(keys)
        return epochs

    @cached_property
    def evaluations(self) -> list[list[Key]]:
        """The samples evaluated, for each stretch between two steps."""
        phases: list[list[Key]] = [[]]
        for _, event in self.events:
            if isinstance(event, Evaluated):
                phases[-1].extend(event.forward.names(self.identity))
            elif isinstance(event, Backward) and phases[-1]:
                phases.append([])
        return [phase for phase in phases if phase]

    @property
    def data_where(self) -> str:
        """The line of the first forward pass in training: where its data reach the model."""
        backward = self.first(Backward)
        return backward.forward.where if backward and backward.forward else ""

    @property
    def draws(self) -> bool:
        """Whether its steps draw from torch's default generator: dropout, augmentation."""
        states = [backward.random for backward in self.of(Backward)]
        return len(states) > 2 and len(set(states)) > len(states) / 2  # iterating over a loader draws once an epoch


@dataclass
class Run:
    """One run of a program."""

    nproc: int  # how many processes it was to have
    processes: list[Process]  # all that were seen, in the order in which they started
    status: int | None  # exit status of the launcher; None: the check ended it
    hung: str  # "idle" (all processes waited), "busy" (one computed without an event), "long" (the time was over) or ""
    flooded: bool  # it printed more than the check reads
    seconds: float  # how long it took
    launch: str  # how its processes were started: "single", "spawn" or "torchrun"
    asked: Asked | None = None  # None: a program that the check does not know
    error_files: set[int] = field(default_factory=set)  # the ranks that left a traceback for torchrun

    @property
    def accumulate(self) -> int:
        """Batches a step that it was asked for."""
        return self.asked.accumulate if self.asked else 1

    @cached_property
    def ranks(self) -> list[Process]:
        """The processes that joined a group, by rank; without a group, those that trained."""
        joined = [process for process in self.processes if process.rank is not None]
        if joined:
            return sorted(joined, key=lambda process: process.rank or 0)
        return [process for process in self.processes if process.steps or process.first(Backward)]

    @cached_property
    def trained(self) -> list[Process]:
        """The ranks that took a step."""
        return [process for process in self.ranks if process.steps]

    @property
    def first_rank(self) -> list[Process]:
        """The first rank that took a step, in a list; empty if the run failed or trained nothing."""
        return [] if self.failed else self.trained[:1]

    def all(self, kind: type[E]) -> Iterator[E]:
        """The events of this kind, of all processes."""
        return (event for process in self.processes for event in process.of(kind))

    def where(self, kind: type[Event]) -> str:
        """The line of the first event of this kind."""
        return next((event.where for event in self.all(kind)), "")

    def settle_identity(self) -> None:
        """Name samples by their content where each rank has a data set of its own: index 0 is then a different sample on each."""
        if len(self.ranks) < 2:
            return
        one, other = map(_rows_by_key, self.ranks[:2])
        again = [rows for rows in (*one.values(), *other.values()) if len(rows) > 1]
        # With random augmentation the content changes, so it only counts where it is the same in each epoch.
        steady = sum(len(set(rows)) == 1 for rows in again) > 0.9 * len(again)
        common = one.keys() & other.keys()
        if steady and sum(one[key][0] != other[key][0] for key in common) > 0.5 * len(common):
            for process in self.processes:
                process.identity = "rows"
                for name in ("steps", "epochs", "evaluations"):
                    process.__dict__.pop(name, None)  # cached with the other names

    def first_exception(self) -> tuple[Process, Raised] | None:
        """The exception that came first, in any process; one that only echoes another's end counts if there is no other."""
        found = [(seconds, process, event) for process in self.processes for seconds, event in process.timed(Raised)]
        first = min(found, key=lambda each: (is_echo(each[2].message, each[2].type), each[0]), default=None)
        return first and first[1:]

    @property
    def failed(self) -> bool:
        """Whether it ended wrongly: it hung, flooded, wrote outside of its folder, or ended with an error."""
        wrote_outside = next(self.all(WroteOutside), None)
        error = self.first_exception() or any(event.status for event in self.all(Exited))
        return bool(self.hung or self.flooded or wrote_outside or error or self.status)

    def shared_file(self) -> tuple[str, list[Process], str] | None:
        """The first file that several ranks write: its path, these ranks, and a line that writes it."""
        writing: dict[str, dict[int, tuple[Process, str]]] = {}
        for process in self.processes:
            if process.steps or process.rank is not None:
                for event in process.of(FileWritten):
                    writing.setdefault(event.path, {}).setdefault(process.pid, (process, event.where))
        for path, by in writing.items():
            if len(by) > 1:
                return path, [process for process, _ in by.values()], next(iter(by.values()))[1]
        return None

    @property
    def ended_by_echo(self) -> bool:
        """Whether the first exception only says that another process has gone."""
        found = self.first_exception()
        return found is not None and is_echo(found[1].message, found[1].type)


def _rows_by_key(process: Process) -> dict[Key, list[Key]]:
    """For each sample of a loader, its contents each time that it was trained on."""
    seen: dict[Key, list[Key]] = {}
    for backward in process.of(Backward):
        if (forward := backward.forward) and forward.loader and len(forward.keys) == len(forward.rows):
            for key, row in zip(forward.keys, forward.rows, strict=True):
                seen.setdefault(key, []).append(row)
    return seen
