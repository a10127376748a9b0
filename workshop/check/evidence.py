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
        identity: what names a sample: "keys" (its index in the data set, where a loader tells it), or "rows" (its content).
    """

    pid: int
    events: list
    stdout: str = ""
    stderr: str = ""
    stack: str = ""
    identity: str = "keys"

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
                steps.append(Step(seconds, what, backwards, self.identity))
                backwards = []
            elif kind == "stepped" and steps:
                steps[-1].after = what
        # A step without a backward before the first one is a library's, to give the optimizer a state that can be filled.
        while len(steps) > 1 and not steps[0].backwards and steps[1].backwards:
            del steps[0]
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
            here, keys = forward["loader"], forward[self.identity]
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
                current.extend(what[self.identity])
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
        identity: what names a sample, as in ``Process``.
        after: the event after it.
    """

    seconds: float
    before: dict
    backwards: list
    identity: str = "keys"
    after: dict = field(default_factory=dict)

    @property
    def keys(self) -> list:
        """The samples whose gradients it steps along."""
        return [key for backward in self.backwards if backward["forward"] for key in backward["forward"][self.identity]]

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

    def settle_identity(self) -> None:
        """Name samples by their content where equal indices on two ranks stand for different samples.

        Each rank may have a data set of its own: then index 0 is another sample on each. With random augmentation the content of
        one sample differs each time, so content only counts where it stays the same from epoch to epoch.
        """
        contents = []
        for process in self.ranks[:2]:
            seen: dict = {}
            for what in process.of("backward"):
                forward = what["forward"]
                if forward and forward["loader"] and len(forward["keys"]) == len(forward["rows"]):
                    for key, row in zip(forward["keys"], forward["rows"], strict=True):
                        seen.setdefault(key, []).append(row)
            contents.append(seen)
        if len(contents) < 2:
            return
        again = [rows for seen in contents for rows in seen.values() if len(rows) > 1]
        common = contents[0].keys() & contents[1].keys()
        steady = again and sum(len(set(rows)) == 1 for rows in again) > 0.9 * len(again)
        if steady and common and sum(contents[0][key][0] != contents[1][key][0] for key in common) > 0.5 * len(common):
            for process in self.processes:
                process.identity = "rows"
                for name in ("steps", "epochs", "evaluations"):
                    process.__dict__.pop(name, None)  # made with the other names

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
        for sign in (
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "Connection refused",
            "Timed out waiting",
        )
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
