"""What a run left: the events of each of its processes, and questions that the rules ask of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from workshop.check.evidence.events import (
    Backward,
    Ended,
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
    """What the check asked a program for that it knows: an exercise.

    Attributes:
        epochs: how many epochs; None: the program counts steps.
        accumulate: batches a step.
        metric: what it has to report: "accuracy" or a further figure of the log; "": nothing.
        images: channels, height and width of the images that its model is for; None: any.
        validation_loss: of a language model's checkpoint before the training, in nats, as transformers alone computes it.
    """

    epochs: int | None = None
    accumulate: int = 1
    metric: str = ""
    images: tuple[int, int, int] | None = None
    validation_loss: float | None = None


@dataclass
class Step:
    """One optimizer step.

    Attributes:
        seconds: when.
        before, after: what was noted before and after it; ``after`` is None if the run ended in it.
        backwards: the backward passes since the step before.
        identity: what names a sample, as in ``Process``.
    """

    seconds: float
    before: StepBegun
    backwards: list[Backward]
    identity: str = "keys"
    after: StepTaken | None = None

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
    """The events of one process.

    Attributes:
        pid: its process id.
        events: pairs (seconds, event) in order.
        stdout, stderr: what it printed, the first megabyte.
        stack: where it was when the run hung: the lines of the stack; "" otherwise.
        identity: what names a sample: "keys" (its index in the data set, where a loader tells it), or "rows" (its content).
    """

    pid: int
    events: list[tuple[float, Event]]
    stdout: str = ""
    stderr: str = ""
    stack: str = ""
    identity: str = "keys"

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
        joined = self.of(Joined)
        return joined[-1].rank if joined else None

    @property
    def ended(self) -> bool:
        """Whether it reached its end."""
        return self.first(Ended) is not None

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
    def unstepped(self) -> int:
        """Backward passes after the last step."""
        count = 0
        for _, event in self.events:
            count = count + 1 if isinstance(event, Backward) else 0 if isinstance(event, StepBegun) else count
        return count

    @cached_property
    def epochs(self) -> list[list[Key]]:
        """The samples trained on, for each pass over a loader (or, without one, until a sample comes again)."""
        epochs: list[list[Key]] = []
        current: list[Key] = []
        loader = None
        seen: set[Key] = set()
        for backward in self.of(Backward):
            forward = backward.forward
            if not forward:
                continue
            keys = forward.names(self.identity)
            new = not epochs or (forward.loader != loader if forward.loader else bool(seen & set(keys)))
            if new:
                current, seen = [], set()
                epochs.append(current)
            loader = forward.loader
            current.extend(keys)
            seen.update(keys)
        return epochs

    @cached_property
    def evaluations(self) -> list[list[Key]]:
        """The samples evaluated, for each stretch between two steps."""
        phases: list[list[Key]] = []
        current: list[Key] = []
        for _, event in self.events:
            if isinstance(event, Evaluated):
                current.extend(event.forward.names(self.identity))
            elif isinstance(event, Backward) and current:
                phases.append(current)
                current = []
        return [*phases, current] if current else phases

    @property
    def data_where(self) -> str:
        """The line of the first forward pass in training: where its data reach the model."""
        backward = self.first(Backward)
        return backward.forward.where if backward and backward.forward else ""

    @property
    def last_where(self) -> str:
        """The last line of the program that was noted."""
        return next((event.where for _, event in reversed(self.events) if event.where), "")

    @property
    def draws(self) -> bool:
        """Whether its steps draw from torch's default generator: dropout, augmentation."""
        states = [backward.random for backward in self.of(Backward)]
        return len(states) > 2 and len(set(states)) > len(states) / 2  # iterating over a loader draws once an epoch


@dataclass
class Run:
    """One run of a program.

    Attributes:
        nproc: how many processes it was to have.
        processes: all that were seen, in the order in which they started.
        status: exit status of the launcher; None: the check ended it.
        hung: "idle" (all processes waited), "busy" (one computed without an event), "long" (the time was over) or "".
        flooded: it printed more than the check reads.
        seconds: how long it took.
        launch: how its processes were started: "single", "spawn" or "torchrun".
        asked: what an exercise was asked for; None: a program that the check does not know.
        error_files: the ranks that left a traceback for torchrun.
    """

    nproc: int
    processes: list[Process]
    status: int | None
    hung: str
    flooded: bool
    seconds: float
    launch: str
    asked: Asked | None = None
    error_files: set[int] = field(default_factory=set)

    @property
    def accumulate(self) -> int:
        """Batches a step that it was asked for."""
        return self.asked.accumulate if self.asked else 1

    @cached_property
    def ranks(self) -> list[Process]:
        """The processes that joined a group, by rank; without a group, those that trained."""
        joined = [(process.rank, process) for process in self.processes if process.rank is not None]
        if joined:
            return [process for _, process in sorted(joined, key=lambda each: each[0])]
        return [process for process in self.processes if process.steps or process.first(Backward)]

    @cached_property
    def trained(self) -> list[Process]:
        """The ranks that took a step."""
        return [process for process in self.ranks if process.steps]

    def all(self, kind: type[E]) -> Iterator[E]:
        """The events of this kind, of all processes."""
        return (event for process in self.processes for event in process.of(kind))

    def settle_identity(self) -> None:
        """Name samples by their content where equal indices on two ranks are different samples.

        Each rank may have a data set of its own: then index 0 is a different sample on each. With random augmentation the
        content of a sample changes, so content only counts where it stays the same from epoch to epoch.
        """
        contents = [_rows_by_key(process) for process in self.ranks[:2]]
        if len(contents) < 2:
            return
        again = [rows for seen in contents for rows in seen.values() if len(rows) > 1]
        common = contents[0].keys() & contents[1].keys()
        steady = again and sum(len(set(rows)) == 1 for rows in again) > 0.9 * len(again)
        if steady and common and sum(contents[0][key][0] != contents[1][key][0] for key in common) > 0.5 * len(common):
            for process in self.processes:
                process.identity = "rows"
                for name in ("steps", "epochs", "evaluations"):
                    process.__dict__.pop(name, None)  # cached with the other names

    def first_exception(self) -> tuple[Process, Raised] | None:
        """The exception that came first, in any process; one that only echoes another's end counts if there is no other."""
        found = [(seconds, process, event) for process in self.processes for seconds, event in process.timed(Raised)]
        if not found:
            return None
        own = [each for each in found if not is_echo(each[2].message, each[2].type)]
        _, process, event = min(own or found, key=lambda each: each[0])
        return process, event

    @property
    def failed(self) -> bool:
        """Whether it ended wrongly: it hung, flooded, wrote outside of its folder, or ended with an error."""
        wrote_outside = any(True for _ in self.all(WroteOutside))
        error = self.first_exception() is not None or any(event.status for event in self.all(Exited))
        return bool(self.hung) or self.flooded or wrote_outside or error or self.status not in (0, None)

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
        forward = backward.forward
        if forward and forward.loader and len(forward.keys) == len(forward.rows):
            for key, row in zip(forward.keys, forward.rows, strict=True):
                seen.setdefault(key, []).append(row)
    return seen
