"""The events of the processes of a run, and properties of them that the rules read."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import TypeVar

from workshop.check.evidence.events import (
    Backward,
    Collective,
    Evaluated,
    Event,
    Exited,
    FileWritten,
    Forward,
    Joined,
    Key,
    Loader,
    ModelDivided,
    Raised,
    StepBegun,
    StepSkipped,
    StepTaken,
    Trainer,
    Wrapped,
    WroteOutside,
)
from workshop.check.evidence.misuses import DataHeld
from workshop.check.evidence.reductions import NO_REDUCTIONS
from workshop.check.evidence.sketches import CLOSE, difference, different_names
from workshop.check.evidence.trail import NO_TRAIL
from workshop.run.failures import is_echo

FEW = 3  # passes before steps that may be evaluations
E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Asked:
    """What an exercise asks a program to do."""

    epochs: int | None = None  # None: the program counts steps
    accumulate: int = 1  # batches per step
    metric: str = ""  # the figure that it must report: "accuracy" or a different one in the log; "": none
    images: tuple[int, int, int] | None = None  # channels, height and width of the images for its model; None: any
    validation_loss: float | None = None  # of a language model before training, in nats, computed with transformers


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
        """The number of optimizer steps before a model is wrapped, which a program may take on each rank alike."""
        events = [event for _, event in self.events if isinstance(event, StepBegun | Wrapped)]
        wrapped = self.first(Wrapped)
        return next((number for number, event in enumerate(events) if event is wrapped), 0)

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
                if 0 < sum(map(len, phases[-1][1].values())) <= 2 * len(used):
                    of_steps.append(len(phases) - 1)
                phase = []
        if len(of_steps) > max(FEW, 0.8 * (len(phases) - 1)):
            return [each for number, each in enumerate(phases) if number not in of_steps]
        return phases

    @property
    def data_where(self) -> str:
        """The line of the first forward pass in training, where the data reach the model."""
        return next((backward.forward.where for backward in self.backwards if backward.forward), "")

    @property
    def draws(self) -> bool:
        """Whether the steps use the default random generator of torch, for example for dropout."""
        states = [backward.random for backward in self.backwards]
        return len(states) > 2 and len(set(states)) > len(states) / 2  # iterating over a loader draws once per epoch


@dataclass
class Run:
    """One run of a program."""

    nproc: int  # number of processes that it should have
    processes: list[Process]  # all processes, in the order in which they started
    status: int | None  # exit status of the launcher; None: the check ended the run
    hung: str  # "idle" (all processes waited), "busy" (one computed without an event), "long" (time limit) or ""
    flooded: bool  # it printed more than the check allows
    seconds: float  # how long it took
    launch: str  # the launcher: "single", "spawn" or "torchrun"
    asked: Asked | None = None  # None: the program is not an exercise
    error_files: set[int] = field(default_factory=set)  # the ranks whose traceback was recorded for torchrun
    planned: frozenset[int] = frozenset()  # numbers of epochs or steps that the options of the program name
    cut: bool = False  # the check ended the run, because it had seen enough: what is missing at the end means nothing

    @property
    def accumulate(self) -> int:
        """Batches per step that the exercise asks for."""
        return self.asked.accumulate if self.asked else 1

    @cached_property
    def ranks(self) -> list[Process]:
        """The processes that joined a group, by rank; without a group, those that trained."""
        joined = [process for process in self.processes if process.rank is not None]
        if self.launch == "spawn":
            # The program may start processes several times, for example for a training and then for a test.
            longest = sorted(joined, key=lambda process: len(process.of(StepTaken)))
            joined = list({process.rank: process for process in longest}.values()) or joined
        if joined:
            return sorted(joined, key=lambda process: process.rank or 0)
        return [process for process in self.processes if process.steps or process.first(Backward)]

    @cached_property
    def trained(self) -> list[Process]:
        """The ranks that took a step."""
        return [process for process in self.ranks if process.steps]

    @property
    def first_rank(self) -> list[Process]:
        """The first rank that took a step, in a list; empty if the run failed or did not train."""
        return [] if self.failed else self.trained[:1]

    @cached_property
    def divided(self) -> str:
        """How the ranks divide one model; "" if each rank has all of it, or FSDP or ZeRO gathers it.

        "stages" of a pipeline, "layers" of which each rank has a part (tensor parallelism), "experts", or other "parts".
        """
        ranks = self.trained
        if any(self.all(ModelDivided)):
            return "layers"
        if len(ranks) < 2 or any(process.steps[0].before.sharded for process in ranks):
            return ""
        first, *others = [_first_of_each_optimizer(process) for process in ranks]
        if all(_alike(each, first) for each in others):
            return "parts" if _has_divided_layer(ranks) else ""
        calls = [call for process in ranks for call in _before_backward(process)]
        inside = {call.name for call in calls if call.inside}
        if any(call.point_to_point for call in calls):
            return "stages"
        if inside and all(name.startswith("all_to_all") for name in inside):
            return "experts"
        summed = any(name.startswith(("all_reduce", "reduce_scatter")) for name in inside)
        return "layers" if summed else "parts" if inside else ""

    def parts_of(self, process: Process) -> set[int | None]:
        """The ranks that have one model together with this one, so that they must see the same samples."""
        own = {process.rank}
        if self.divided in ("stages", "parts"):
            return {each.rank for each in self.trained}
        if given := process.first(ModelDivided):
            return own | set(given.ranks)
        if self.divided == "layers":
            for call in _before_backward(process):
                if call.inside:
                    own |= set(call.group) or {each.rank for each in self.trained}
        return own

    def all(self, kind: type[E]) -> Iterator[E]:
        """The events of this kind, of all processes."""
        return (event for process in self.processes for event in process.of(kind))

    def where(self, kind: type[Event]) -> str:
        """The line of the first event of this kind."""
        return next((event.where for event in self.all(kind)), "")

    def settle_steps(self) -> None:
        """Leave out the steps of trainings that only some ranks do, such as that of a teacher on rank 0 alone."""
        by = [{step.before.trainer for step in process.steps} for process in self.trained]
        common = set.intersection(*by) if by else set()
        if len(by) > 1 and common:
            for process, own in zip(self.trained, by, strict=True):
                process.ignored = frozenset(own - common)
                process.forget()

    def settle_identity(self) -> None:
        """Identify samples by content if each rank has its own data set, where the same index means different samples."""
        if len(self.ranks) < 2:
            return
        one, other = map(_rows_by_key, self.ranks[:2])
        again = [rows for rows in (*one.values(), *other.values()) if len(rows) > 1]
        # Random augmentation changes the content, so compare contents only if they are the same in each epoch.
        steady = sum(len(set(rows)) == 1 for rows in again) > 0.9 * len(again)
        common = one.keys() & other.keys()
        differ = sum(one[key][0] != other[key][0] for key in common) > 0.5 * len(common)
        if (steady and differ) or _hold_different_data({key[:2] for key in common}, self.ranks[0], self.ranks[1]):
            for process in self.processes:
                process.identity = "rows"
                process.forget()

    def first_exception(self) -> tuple[Process, Raised] | None:
        """The first exception of any process; exceptions that only report the end of a different process come last."""
        found = [(seconds, process, event) for process in self.processes for seconds, event in process.timed(Raised)]
        first = min(found, key=lambda each: (is_echo(each[2].message, each[2].type), each[0]), default=None)
        return first and first[1:]

    @property
    def failed(self) -> bool:
        """Whether the run hung, flooded, wrote outside its folder, or ended with an error."""
        wrote_outside = next(self.all(WroteOutside), None)
        error = self.first_exception() or any(event.status for event in self.all(Exited))
        return bool(self.hung or self.flooded or wrote_outside or error or self.status)

    def shared_files(self) -> list[tuple[str, list[Process], str]]:
        """The files that several ranks write, the first one of each line: its path, the ranks, and this line."""
        writing: dict[str, dict[int, tuple[Process, str]]] = {}
        for process in self.processes:
            if process.steps or process.rank is not None:
                for event in process.of(FileWritten):
                    if event.path.endswith(".lock"):
                        continue  # all ranks open it, so that only one of them does something
                    writing.setdefault(event.path, {}).setdefault(process.pid, (process, event.where))
        found: dict[str, tuple[str, list[Process], str]] = {}
        for path, by in writing.items():
            if len(by) > 1:
                where = next(iter(by.values()))[1]
                found.setdefault(where, (path, [process for process, _ in by.values()], where))
        return list(found.values())

    @property
    def apart(self) -> bool:
        """Whether ranks wait for each other, have lost each other, or made different numbers of collectives."""
        ranks = [process for process in self.ranks if process.rank is not None]
        if len(ranks) < 2 or self.flooded or self.cut:
            return False
        unequal = any(len({len(each) for each in calls}) > 1 for _, calls in collectives_of_groups(ranks))
        silent = self.first_exception() is None and not any(event.status for event in self.all(Exited))
        return self.hung == "idle" or (self.ended_by_echo or silent if self.failed else unequal)

    def elsewhere(self) -> tuple[Process, Raised, Process, FileWritten] | None:
        """A rank that misses a file, and a rank that has written a file of this name in a different folder beside it."""
        found = self.first_exception()
        named = found and re.search(r"No such file or directory: '(.+)'", found[1].message)
        if found is None or not named:
            return None
        missing = PurePath(named[1]).parts
        for process in self.ranks:
            for event in process.of(FileWritten):
                written = PurePath(event.path).parts[-len(missing) :]
                same = [one == other for one, other in zip(missing, written, strict=False)]
                if process is not found[0] and len(same) == len(missing) and same.count(False) == 1 and same[-1]:
                    return *found, process, event
        return None

    @property
    def ended_by_echo(self) -> bool:
        """Whether the first exception only says that a different process has ended."""
        found = self.first_exception()
        return found is not None and is_echo(found[1].message, found[1].type)


def collectives_of_groups(ranks: list[Process]) -> list[tuple[list[Process], list[list[Collective]]]]:
    """Return for each process group its ranks, and the collectives that each of them called in this group, in order."""
    calls = [[call for call in process.of(Collective) if not call.point_to_point] for process in ranks]
    groups = {call.group for each in calls for call in each} | {()}
    found = []
    for group in sorted(groups):
        members = [
            (process, each) for process, each in zip(ranks, calls, strict=True) if not group or process.rank in group
        ]
        own = [[call for call in each if call.group == group] for _, each in members]
        found.append(([process for process, _ in members], own))
    return found


def _first_of_each_optimizer(process: Process) -> list[StepBegun]:
    """The first step of each optimizer, by the lines that created them."""
    found: dict[str, StepBegun] = {}
    for step in process.steps:
        found.setdefault(step.before.made, step.before)
    return list(found.values())


def _alike(ones: list[StepBegun], others: list[StepBegun]) -> bool:
    """Whether optimizers of two ranks begin with the same parameters."""
    return len(ones) == len(others) and all(
        one.names == other.names and difference(one.weights, other.weights) <= CLOSE
        for one, other in zip(ones, others, strict=True)
    )


def _has_divided_layer(ranks: list[Process]) -> bool:
    """Whether the ranks seem to divide a layer beside DistributedDataParallel, such as one with a weight for each class.

    Only its gradients differ in the first step, and its forward pass gathers inputs and reduces partial results.
    """
    wrapped = {name for event in ranks[0].of(Wrapped) for name in event.names}
    first, *others = (process.steps[0].before for process in ranks)
    known = tuple(f"module.{name}" for name in wrapped)
    outside = {name for name in first.names if name not in wrapped and not name.endswith(known)} if known else set()
    differ = {name for each in others for name in different_names(first.gradients, each.gradients, first.names)}
    calls = {call.name for call in _before_backward(ranks[0]) if call.inside and math.prod(call.shape or ()) > 1}
    gathers = any(name.startswith(("all_gather", "all_to_all")) for name in calls)
    return bool(differ) and differ <= outside and gathers and any(name.startswith("all_reduce") for name in calls)


def _before_backward(process: Process) -> list[Collective]:
    """The collectives of a rank before its first backward pass, and the messages that it sends or receives."""
    found = []
    for _, event in process.events:
        if isinstance(event, Backward):
            break
        if isinstance(event, Collective):
            found.append(event)
    return found


def _hold_different_data(names: set[Key], one: Process, other: Process) -> bool:
    """Whether the data sets of two ranks with one of these names and lengths have different contents."""
    ours, theirs = (
        {
            ((each.name, each.length), attribute): checksum
            for each in process.of(DataHeld)
            for attribute, checksum in each.contents.items()
        }
        for process in (one, other)
    )
    return any(each[0] in names and ours[each] != theirs[each] for each in ours.keys() & theirs.keys())


def _rows_by_key(process: Process) -> dict[Key, list[Key]]:
    """For each sample of a loader, its contents each time that it was used in training."""
    seen: dict[Key, list[Key]] = {}
    for backward in process.of(Backward):
        if (forward := backward.forward) and forward.loader and len(forward.keys) == len(forward.rows):
            for key, row in zip(forward.keys, forward.rows, strict=True):
                seen.setdefault(key, []).append(row)
    return seen
