"""What a run left: the events of each of its processes, and questions that the rules ask of them."""

import pickle
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass
class Process:
    """The notes of one process.

    Attributes:
        pid: its process id.
        events: tuples (seconds, kind, dict) in order.
        stdout, stderr: what it printed, the first megabyte.
        stack: where it stood when the run hung: "file.py:12" and the lines of the stack; "" otherwise.
        status: exit status if known; negative: the signal that ended it.
    """

    pid: int
    events: list
    stdout: str = ""
    stderr: str = ""
    stack: str = ""
    status: int | None = None

    def of(self, *kinds: str) -> list[dict]:
        """The events of these kinds, in order."""
        return [what for _, kind, what in self.events if kind in kinds]

    @cached_property
    def rank(self) -> int | None:
        joined = self.of("joined")
        return joined[-1]["rank"] if joined else None

    @cached_property
    def steps(self) -> list["Step"]:
        """The optimizer steps, each with the backwards before it."""
        steps, backwards = [], []
        for seconds, kind, what in self.events:
            if kind == "backward":
                backwards.append(what)
            elif kind == "step":
                steps.append(Step(seconds, what, backwards))
                backwards = []
            elif kind == "stepped" and steps:
                steps[-1].after = what
        return steps

    @cached_property
    def unstepped(self) -> int:
        """Backwards after the last step."""
        count = 0
        for _, kind, _ in self.events:
            count = count + 1 if kind == "backward" else 0 if kind == "step" else count
        return count

    @cached_property
    def epochs(self) -> list[list]:
        """The keys of the samples trained on, for each pass over a loader (or, without one, until a sample comes again)."""
        epochs, current, loader, seen = [], None, None, set()
        for what in self.of("backward"):
            forward = what["forward"]
            if not forward:
                continue
            here, keys = forward["loader"], forward["keys"]
            new = current is None or (here != loader if here else bool(seen & set(keys)))
            if new:
                current, seen = [], set()
                epochs.append(current)
            loader = here
            current.extend(keys)
            seen.update(keys)
        return epochs

    @cached_property
    def evaluations(self) -> list[list]:
        """The keys of the samples evaluated, for each stretch between two steps."""
        phases, current = [], []
        for _, kind, what in self.events:
            if kind == "evaluated":
                current.extend(what["keys"])
            elif kind == "backward" and current:
                phases.append(current)
                current = []
        return [*phases, current] if current else phases


@dataclass
class Step:
    """One optimizer step.

    Attributes:
        seconds: when.
        before: the event before it: gradients, weights, learning rates.
        backwards: the backwards since the step before.
        after: the event after it.
    """

    seconds: float
    before: dict
    backwards: list
    after: dict = field(default_factory=dict)

    @property
    def keys(self) -> list:
        """The samples whose gradients it steps along."""
        return [key for backward in self.backwards if backward["forward"] for key in backward["forward"]["keys"]]

    @property
    def rows(self) -> list:
        """The contents of these samples, as the model saw them."""
        return [row for backward in self.backwards if backward["forward"] for row in backward["forward"]["rows"]]


@dataclass
class Run:
    """One run of a program.

    Attributes:
        nproc: how many processes it was to have.
        processes: all that were seen, in the order in which they started.
        status: exit status of the launcher; None: it had to be ended.
        hung: "idle" (all waited), "busy" (one ran on without doing anything), "long" (the time was over) or "".
        flooded: it printed more than can be read.
        seconds: how long it took.
        launch: how its processes were started.
        accumulate: batches a step that it was asked for.
        error_files: the ranks that wrote down, for torchrun, why they failed.
    """

    nproc: int
    processes: list[Process]
    status: int | None
    hung: str
    flooded: bool
    seconds: float
    launch: str
    accumulate: int = 1
    error_files: set[int] = field(default_factory=set)

    @cached_property
    def ranks(self) -> list[Process]:
        """The processes that trained or joined a group, by rank; without a group, those that trained."""
        joined = sorted((p for p in self.processes if p.rank is not None), key=lambda p: p.rank)
        if joined:
            return joined
        return [p for p in self.processes if p.steps or p.of("backward")]

    @cached_property
    def trained(self) -> list[Process]:
        return [process for process in self.ranks if process.steps]

    def first_exception(self) -> tuple[Process, dict] | None:
        """The exception that came first, in any process; of the peers' only if nobody failed by himself."""
        found = [
            (seconds, process, what)
            for process in self.processes
            for seconds, kind, what in process.events
            if kind == "exception"
        ]
        if not found:
            return None
        own = [item for item in found if not is_echo(item[2])]
        _, process, what = min(own or found, key=lambda item: item[0])
        return process, what


def is_echo(exception: dict) -> bool:
    """Whether an exception only says that another process has gone."""
    text = exception["message"]
    return exception["type"] in ("ProcessRaisedException", "ProcessExitedException", "ChildFailedError") or any(
        sign in text
        for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Timed out waiting")
    )


def read_process(folder: Path, pid: int) -> Process:
    """The process with this id, from its files in ``folder``."""
    events = []
    with open(folder / f"events-{pid}", "rb") as file:
        while True:
            try:
                events.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):  # the last one may be cut short
                break

    def text(name):
        path = folder / f"{name}-{pid}"
        if not path.exists():
            return ""
        with open(path, "rb") as file:
            return file.read(1_000_000).decode(errors="replace")

    return Process(pid, events, text("stdout"), text("stderr"), text("stacks"))
