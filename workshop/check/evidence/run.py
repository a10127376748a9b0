"""The events of the processes of a run, and properties of them that the rules read."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath

from workshop.check.evidence.events import (
    AcceleratorCalled,
    Backward,
    Collective,
    Event,
    Exited,
    FileWritten,
    Key,
    ModelDivided,
    Raised,
    StepBegun,
    StepTaken,
    Wrapped,
    WroteOutside,
)
from workshop.check.evidence.misuses import DataHeld
from workshop.check.evidence.process import E, Process
from workshop.check.evidence.sketches import CLOSE, difference, different_names
from workshop.run.failures import is_echo


@dataclass(frozen=True)
class Asked:
    """What an exercise asks a program to do."""

    epochs: int | None = None  # None: the program counts steps
    accumulate: int = 1  # batches per step
    metric: str = ""  # the figure that it must report: "accuracy" or a different one in the log; "": none
    images: tuple[int, int, int] | None = None  # channels, height and width of the images for its model; None: any
    validation_loss: float | None = None  # of a language model before training, in nats, computed with transformers


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
        if any(name.startswith("all_to_all") for name in inside):
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
        # The contents of a sample that is a number are unknown, but not those of its data set.
        used = (
            {key[:2] for each in process.backwards if each.forward for key in each.forward.keys}
            for process in self.ranks
        )
        names = set.intersection(*used)
        if (steady and differ) or _hold_different_data(names, self.ranks[0], self.ranks[1]):
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
                by_accelerate = any(call.name == "save_state" for call in process.of(AcceleratorCalled))
                for event in process.of(FileWritten):
                    if event.path.endswith(".lock") or (by_accelerate and event.path.endswith("/scaler.pt")):
                        continue  # all ranks open it, so that only one does something; save_state() writes it on all ranks
                    writing.setdefault(event.path, {}).setdefault(process.pid, (process, event.where))
        found: dict[str, tuple[str, list[Process], str]] = {}
        for path, by in writing.items():
            ranks = {pid if process.rank is None else process.rank for pid, (process, _) in by.items()}
            if len(ranks) > 1:  # a program may start its ranks again, for example for another fold of the data
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
