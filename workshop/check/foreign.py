"""Make the scenarios of a program as its owner starts it, in a copy of its folder."""

import bisect
import itertools
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from workshop.check import lightning_ranks, ranks_of_mpi
from workshop.check.bench import TRACED, ProgramBench
from workshop.check.clock import mark_times
from workshop.check.comparing import keep, replace, replace_all, without_chance
from workshop.check.evaluated import restore, store
from workshop.check.evidence.events import (
    BatchLoaded,
    CheckpointCalled,
    EngineMade,
    FileRenamed,
    FileWritten,
    GpuNoted,
    Joined,
    Loaded,
    ModelUpdated,
    Saved,
    Stopped,
    Wrapped,
)
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.folder import copy_in_surroundings, special_files, top_of
from workshop.check.judge import Made
from workshop.check.launching import SHORT
from workshop.check.probes import Probe, Recorder
from workshop.check.probes.checkpoints import SAVES_TENSORS, Checkpoints, SafeTensors
from workshop.check.probes.deepspeed import Engine
from workshop.check.probes.reductions import Reductions
from workshop.check.probes.replicas import Replicas
from workshop.check.program_text import (
    one_process,
    planned,
    resized,
    resume_arguments,
    settings,
    sources,
    start_of_its_own,
)
from workshop.check.rules.by_hand import reduces_each_batch
from workshop.check.rules.gradients import steps_until_apart, steps_until_buffers_differ
from workshop.check.rules.metrics import prints_metrics
from workshop.check.scenarios import (
    COMPARED,
    DEVICES,
    METRICS,
    SPLIT,
    TWO_NODES,
    WHOLE,
    Compared,
    Narrow,
    Scenario,
    Split,
    Unavailable,
)
from workshop.check.start import USUAL, Start
from workshop.check.subject import Subject
from workshop.run.environment import free_port
from workshop.run.stillness import Patience

# An unknown program may load a data set, or compute for a minute, before its first step.
UNKNOWN = Patience(idle=10, busy=60, total=600)
LONGEST = 180  # seconds of a run on pretended GPUs
STEPS = 30  # optimizer steps after which a long run is stopped
PRETENDED = 6  # optimizer steps on pretended GPUs
PASSES = 300  # backward passes before the first checkpoint, for which pretended GPUs are fast enough
GPU = re.compile(r"cuda|\bgpus?\b|\bGPUs?\b|torch\.accelerator")  # the program may require one
# The types of errors of a program for GPUs whose tensors are on the CPU.
UNSUITABLE = {"RuntimeError", "AttributeError", "NotImplementedError", "AssertionError", "ValueError", "TypeError"}
OF_FOLDERS = ("random_states_0.pkl", "trainer_state.json", ".metadata")  # of libraries that load the folder
MISSING = ("FileNotFoundError", "NotADirectoryError", "IsADirectoryError")  # a guess named the wrong kind of path


@dataclass(frozen=True)
class Wishes:
    """What the owner asks of the check."""

    steps: int | None = None  # after how many steps it stops; None: after STEPS, if the run takes long
    resume: tuple[str, ...] = ()  # the arguments with which a second start resumes; "{latest}" is the newest checkpoint


class OwnersBench(ProgramBench):
    """Makes WHOLE, COMPARED and SPLIT of a program, given the command that starts it; ``place`` is an empty folder."""

    def __init__(
        self, subject: Subject, start: Start, *, on_cpu: bool, place: Path, original: Path, wishes: Wishes = Wishes()
    ):
        self.start, self.original, self.wishes = start, original, wishes
        launch = "spawn" if start.launch == "python" else start.launch
        super().__init__(subject, launch=launch, nproc=start.nproc, on_cpu=on_cpu, place=place)
        self.text = sources(subject.file, original)
        if launch == "mpirun":
            ranks_of_mpi.require(self.text)
        self.planned = frozenset(planned([self.text, *settings(start.arguments, original)], start.arguments))
        counted = "device_count", *((os.environ | start.variables).keys() & {"CUDA_VISIBLE_DEVICES"})
        counts = launch == "spawn" and any(each in self.text for each in counted)
        uses_all = counts or lightning_ranks.uses_all_gpus(self.text)
        self.for_gpus = on_cpu and GPU.search(self.text) is not None
        self.compiler = self.for_gpus  # pretended GPUs need it
        self.gpus: int | None = self._gpus_per_node() if uses_all or self.for_gpus else 0
        self.of_others: tuple[str, ...] = ()  # arguments that only ranks after the first get
        self.devices = start.needs_gpus and on_cpu  # whether it runs on pretended GPUs from the start
        self.kept = place / "batches"  # of the whole run
        self.warmup = 0  # of its first rank
        self.resumes_by_itself = False  # whether a second start resumes without further arguments

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that it can make, in the order in which they are made."""
        pretended = (*([TWO_NODES] if self.launch == "torchrun" and self.start.nodes == 1 else []), DEVICES)
        return (WHOLE, COMPARED, METRICS, SPLIT, *(pretended if self.for_gpus else ()))

    @cached_property
    def probes(self) -> tuple[type[Probe], ...]:
        """The probes that the rules need, and those of DeepSpeed and of kinds of checkpoints, if they are used."""
        words = " ".join((*self.start.arguments, *self.start.variables))
        more = {Checkpoints: "distributed.checkpoint" in self.text, Engine: "deepspeed" in words.lower()}
        more |= {SafeTensors: SAVES_TENSORS.search(self.text) is not None}
        return tuple(dict.fromkeys((*super().probes, *(probe for probe, used in more.items() if used))))

    def makers(self) -> dict[Scenario[Any], Callable[[Made], object]]:
        """Map each scenario to the function that makes it from the earlier ones."""
        return {
            WHOLE: lambda made: self._whole(),
            COMPARED: self._compare,
            METRICS: self._metrics,
            SPLIT: self._split,
            DEVICES: lambda made: self._pretended(made, self.nproc, self.start.nodes),
            TWO_NODES: lambda made: self._pretended(made, 2 * self.nproc, 2),
        }

    def folder(self) -> Path:
        """Create a copy of the program's folder for a run."""
        return copy_in_surroundings(self.original, super().folder())

    def _run(self, scratch: Path, arguments: Sequence[str] = (), **changes: Any) -> Run:
        inside = self.script.is_relative_to(self.original)
        if self.launch == "spawn" and changes.get("devices", self.devices):
            changes.setdefault("nproc", max(USUAL, self.nproc))  # so many GPUs
        own = resized(self.start.arguments, self.nproc, changes.get("nproc", self.nproc))
        run = self.launch_program(
            (*own, *arguments),
            scratch=scratch,
            script=scratch / self.script.relative_to(self.original) if inside else self.script,
            original=self.original,
            module=self.start.target if self.start.is_module else "",
            variables=self.start.variables | ({} if changes.get("devices", self.devices) else self.start.on_cpu),
            port=free_port(),
            **{
                "patience": UNKNOWN,
                "gpus": self.gpus,
                "of_others": self.of_others,
                "devices": self.devices,
                "steps": self.wishes.steps or STEPS,
                "at_once": self.wishes.steps is not None,
                "warmup": self.warmup,
                "nodes": self.start.nodes,
                "bound": self.start.bound,
                "shell": self.start.shell,
                **changes,
            },
        )
        if self.launch == "spawn":
            sizes = [event.world_size for event in run.all(Joined)]
            run.nproc = max([1, len(run.trained), *sizes])
        run.planned = self.planned
        return run

    def _whole(self) -> Run:
        lightning = self.launch == "spawn" and lightning_ranks.USED.search(self.text)
        first = self._as_lightning_starts_it if lightning else partial(self._run, before=keep(self.kept))
        run = first(self.folder())
        if self._needs_other_gpus(run):
            run = self._with_other_gpus(first, run)
        elif self._may_wrap_on_gpus(run):
            usual, (self.gpus, self.devices) = (self.gpus, self.devices), (None, True)
            again = first(self.folder())
            if again.trained and any(again.all(Wrapped)):
                run = again
            else:
                self.gpus, self.devices = usual
        self.warmup = run.trained[0].warmup if run.trained else 0
        return run if lightning else self._retraced(self.traced(run, partial(self._again, before=keep(self.kept))))

    def _needs_other_gpus(self, run: Run) -> bool:
        """Whether a program for GPUs has not trained together, or failed in a way that GPUs, or their absence, may explain."""
        found = run.first_exception()
        wants = self.for_gpus or (found is not None and GPU.search(found[1].message))
        apart = run.nproc > 1 and not any(run.all(Joined))
        unsuitable = found is not None and found[1].type in UNSUITABLE and run.failed and not run.hung
        return bool(wants and self.on_cpu and not self.devices and (apart or not run.trained or unsuitable))

    def _may_wrap_on_gpus(self, run: Run) -> bool:
        """Whether the ranks of a program with DistributedDataParallel drift apart without it, because no tensor is on a GPU."""
        able = self.for_gpus and self.on_cpu and not self.devices and "DistributedDataParallel" in self.text
        last = [process.steps[-1].before.weights for process in run.trained]
        drifted = any(difference(last[0], each) > CLOSE for each in last[1:])
        return able and drifted and not any(run.all(Wrapped))

    def _with_other_gpus(self, first: Callable[[Path], Run], run: Run) -> Run:
        """Run it again: without GPUs, with GPUs whose tensors are on the CPU, and with pretended GPUs. Return the best run."""
        if any(run.all(Joined)) and _lacks_package(run):
            return run
        usual = self.gpus, self.devices
        for gpus, devices in ((0, False), (self._gpus_per_node(), False), (None, True)):
            if (gpus, devices) == usual:
                continue
            self.gpus, self.devices = gpus, devices
            again = first(self.folder())
            joined = any(again.all(Joined)) and any(run.all(Wrapped)) <= any(again.all(Wrapped))  # in DDP, as before
            before, now = (len(each.trained[0].steps) if each.trained else 0 for each in (run, again))
            further = not before or not again.failed or now > before
            together = again.trained and (joined or not run.trained) and further
            if together or (joined and _lacks_package(again)) or (gpus != 0 and _got_further(again, run)):
                return again
        self.gpus, self.devices = usual
        return run

    def _gpus_per_node(self) -> int:
        if self.start.bound:
            return 1
        return self.start.nproc // self.start.nodes if self.launch != "spawn" else USUAL

    def _retraced(self, run: Run) -> Run:
        """Look closer in a second run: at which line parameters become different, or which gradients are added up by hand."""
        looks = not (run.failed or run.apart or run.seconds >= TRACED)
        steps = looks and (steps_until_apart(run) or steps_until_buffers_differ(run))
        if steps:
            second = self._again(probes=(*self.probes, Replicas), steps=steps, at_once=True)
            for process, again in zip(run.ranks, second.ranks, strict=False):
                process.replica = again.trail
        elif not run.failed and reduces_each_batch(run):
            second = self._again(probes=(*self.probes, Reductions), steps=2, at_once=True)
            for process, again in zip(run.ranks, second.ranks, strict=False):
                process.reductions = again.reductions
        return run

    def _again(self, **changes: Any) -> Run:
        # If the first run hung, this one hangs too, and soon shows it.
        patience = Patience(idle=SHORT, busy=UNKNOWN.busy, total=UNKNOWN.total)
        return self._run(self.folder(), patience=patience, **changes)

    def _as_lightning_starts_it(self, scratch: Path) -> Run:
        """Started with python, Lightning starts further copies of the program; fork this number of ranks instead."""
        asked = scratch / "tmp" / "ranks"
        run = self._run(scratch, before=lightning_ranks.Ranks(asked))
        if not asked.exists():
            return run  # it trains with one process
        self.launch, self.nproc = "torchrun", int(asked.read_text())
        self.of_others = lightning_ranks.HYDRA if "hydra.main" in self.text else ()
        return self._run(self.folder(), before=keep(self.kept))

    def _compare(self, made: Made) -> Compared:
        """Run two steps with all processes, and with one that gets the batches of all of them, or divides nothing."""
        whole: Run = made[WHOLE]
        if whole.failed or whole.nproc < 2:
            raise Unavailable("" if whole.failed else "what several processes do: only one has trained")
        # A program without seeds also begins both runs with the same parameters.
        alike: dict[str, Any] = {"steps": 2, "at_once": True, "entropy": secrets.randbelow(2**31)}
        alike["before"] = replace(self.kept, whole.nproc) if any(whole.all(BatchLoaded)) else without_chance
        several = self._run(self.folder(), **alike)
        if narrow := several.failed and any(whole.all(BatchLoaded)):
            several = self._run(self.folder(), **alike | {"before": replace(self.kept, whole.nproc, padded=False)})
        return (Narrow if narrow else Compared)(several, self._alone(**alike))

    def _metrics(self, made: Made) -> Compared:
        """Run the program with all processes, and with one that gets their batches, and their parameters at evaluations."""
        whole: Run = made[WHOLE]
        if whole.failed or whole.nproc < 2 or not whole.trained:
            raise Unavailable("")
        if not prints_metrics(whole.trained[0]):
            raise Unavailable(f"{METRICS.title} (the ranks exchange no values in an evaluation before it prints)")
        parameters = self.place / "parameters"

        def before(evaluations: Callable[[Path], Callable[[Recorder], None]], recorder: Recorder) -> None:
            mark_times()
            replace_all(self.kept, whole.nproc)(recorder)
            evaluations(parameters)(recorder)

        alike: dict[str, Any] = {"entropy": secrets.randbelow(2**31)}
        stopped = whole.trained[0].first(Stopped)
        alike |= {"steps": stopped.steps, "at_once": True} if stopped else {}
        several = self._run(self.folder(), before=partial(before, store), **alike)
        return Compared(several, self._alone(before=partial(before, restore), **alike))

    def _alone(self, **changes: Any) -> Run:
        """Run the program with one process. If it starts its processes itself, tell it so."""
        if not self.devices:
            # Many programs start a process for each GPU, or take the number of GPUs for that of the processes.
            changes["gpus"] = 1 if self.gpus else 0
        arguments = one_process(self.text) if self.launch == "spawn" else []
        if lightning_ranks.USED.search(self.text):
            changes["before"] = lightning_ranks.alone(changes["before"])
        return self._run(self.folder(), arguments, nproc=1, nodes=1, **changes)

    def _pretended(self, made: Made, nproc: int, nodes: int) -> Run:
        """Run some steps on pretended GPUs. If the program resumes, the run is one that has resumed on them."""
        whole: Run = made[WHOLE]
        if any(whole.all(EngineMade)) or any(each.startswith("--deepspeed") for each in self.start.arguments):
            raise Unavailable("what GPUs show (DeepSpeed does not run on pretended GPUs)")
        before: Run | None = made.get(TWO_NODES)
        # A second run is needed only if the program has failed on the second node, as many do that are for one node.
        enough = before and before.trained and not any(event.kind == "no-such-gpu" for event in before.all(GpuNoted))
        if whole.failed or not whole.trained or enough:
            raise Unavailable("")
        patience = Patience(idle=UNKNOWN.idle, busy=UNKNOWN.busy, total=LONGEST)
        nproc = max(nproc, whole.nproc)
        run = partial(self._run, nproc=nproc, nodes=nodes, devices=True, gpus=None, patience=patience)
        scratch, few, rounds = self.folder(), PRETENDED, _rounds(whole)
        if len(whole.trained[0].backwards) > PASSES * max(1, _saves_of(whole)):
            rounds = {}  # it would take minutes
        second = made[SPLIT].second if rounds and SPLIT in made else None
        if second and any(second.all(Loaded)) and not second.failed:
            if not self.resumes_by_itself:
                return run(scratch, steps=max(few, 1 + min(rounds)), at_once=True)
            first = run(scratch, dies=min(rounds[min(rounds)].values())[0])
            if not _saves_of(first):  # it failed before
                return first
        return run(scratch, steps=few, at_once=True)

    def _split(self, made: Made) -> Split:
        """Kill the program in the step after its first checkpoint, and start it again in the same folder."""
        whole: Run = made[WHOLE]
        if whole.failed:
            raise Unavailable("")
        saves = _first_save(whole)
        if saves is None:
            raise Unavailable("whether the program resumes from a checkpoint: it saves none before its last step")
        scratch = self.folder()
        first = self._run(scratch, dies=saves)
        taken = len(first.trained[0].steps) if first.trained else 0
        left = {"steps": len(whole.trained[0].steps) - taken, "at_once": True} if whole.cut else {}
        files = _checkpoints(first, least=1) or _checkpoints(first)
        saved = {os.path.relpath(path, scratch.resolve()) for path in files}
        tried, ended, one = "", "loads no checkpoint", 1
        for arguments in self._resume(first, scratch):
            again = self._copy(scratch)
            if self.wishes.resume:
                return Split(first, self._run(scratch, arguments, **left))
            if arguments and (counted := start_of_its_own(self.text, self.start.arguments)):
                raise Unavailable(
                    f"whether a second start resumes: it also wants {counted}; pass it, for example: "
                    f"--resume-args '{shlex.join(arguments)} {counted} 1'"
                )
            run = self._run(again, arguments, steps=one, at_once=True)
            if _loads(run, again, saved):
                self.resumes_by_itself = not arguments
                return Split(first, self._run(scratch, arguments, **left))
            tried, ended = shlex.join(arguments), _end_of(run)
        given = f"with {tried} it" if tried else "it"
        raise Unavailable(
            f"whether a second start resumes: {given} {ended}; if it resumes with other arguments, pass them: "
            "--resume-args '--resume {latest}'"
        )

    def _copy(self, scratch: Path) -> Path:
        """Copy the folder of a run that ended, so that several second starts can be tried."""
        base = ProgramBench.folder(self)
        top = top_of(scratch, self.original)
        shutil.copytree(top, base, symlinks=True, dirs_exist_ok=True, ignore=special_files)
        return base / scratch.relative_to(top)

    def _resume(self, first: Run, scratch: Path) -> Iterator[list[str]]:
        """Yield the arguments with which the second start may resume."""
        latest = _latest(first, scratch)
        if self.wishes.resume:
            whole = any((scratch / latest).with_name(name).exists() for name in OF_FOLDERS)
            given = os.path.dirname(latest) if latest and whole else latest
            yield [each.replace("{latest}", given) for each in self.wishes.resume]
            return
        yield []
        yield from resume_arguments(self.text, self.start.arguments, latest)


def _lacks_package(run: Run) -> bool:
    """Whether it ended because the program imports a package that is not installed."""
    found = run.first_exception()
    return found is not None and found[1].type in ("ImportError", "ModuleNotFoundError")


def _got_further(run: Run, other: Run) -> bool:
    """Whether neither run trains, but this one fails at a different line: it found the GPUs that the other one missed."""
    here, there = run.first_exception(), other.first_exception()
    return here is not None and there is not None and here[1].where != there[1].where


def _end_of(run: Run) -> str:
    """How a second start ended that loaded no checkpoint."""
    found = None if run.trained else run.first_exception()
    place = f" at {found[1].where}" if found and found[1].where else ""
    return f"ends with {found[1].type}{place}" if found else "loads no checkpoint"


def _loads(run: Run, folder: Path, saved: set[str]) -> bool:
    """Whether a second start loaded one of these files, and did not fail before it trained."""
    loaded = {os.path.relpath(event.path, folder.resolve()) for event in run.all(Loaded) if event.path}
    loads = bool(loaded & saved) or any(event.name == "load" for event in run.all(CheckpointCalled))
    found = run.first_exception()
    refused = run.failed and not run.trained and (found is None or found[1].type in MISSING)
    return loads and not refused


def _rounds(run: Run) -> dict[int, dict[str, tuple[int, float]]]:
    """The saves of the process that saves, by the number of steps before: the files, with number and time of the save.

    If the run saves models, then only files with parameters: data sets may keep prepared samples in files too.
    """
    models = any(event.keys for event in run.all(Saved))
    for process in run.processes:
        saves = sorted(_saved(process), key=lambda each: each[0])
        steps = [step.seconds for step in (process.steps or (run.trained[0].steps if run.trained else []))]
        rounds: dict[int, dict[str, tuple[int, float]]] = {}
        for number, (seconds, event) in enumerate(saves, 1):
            sample = models and isinstance(event, Saved) and not event.keys
            if steps and steps[0] < seconds < steps[-1] and not sample:
                name = event.path if isinstance(event, Saved) else ""
                rounds.setdefault(bisect.bisect(steps, seconds), {})[name] = number, seconds
        if rounds:
            return rounds
    return {}


def _first_save(run: Run) -> int | None:
    """The number of the save, in the process that saves, after which the run is killed; None: there is none between two steps.

    It is the first one or, if a file such as the best model is not saved every time, the last one before it is left out: then
    the second start shows whether it knows the best value so far. A copy such as an average has been updated before it, and the
    parameters have changed: a schedule may begin with a learning rate of 0.
    """
    updated = min((seconds for process in run.processes for seconds, _ in process.timed(ModelUpdated)), default=0.0)
    steps = run.trained[0].steps if run.trained else []
    updated = max(updated, next((step.seconds for step in steps if any(step.before.rates or [1.0])), 0.0))
    rounds = _rounds(run)
    before: set[str] = set()
    for now, following in itertools.pairwise(rounds.values()):
        before |= now.keys()
        if before - following.keys():
            return max(now.values())[0]
    first = [min(each.values()) for each in rounds.values()]
    return next((number for number, seconds in first if seconds > updated), first[0][0] if first else None)


def _saves_of(run: Run) -> int:
    """The number of checkpoints that a run saves."""
    return max((len(_saved(process)) for process in run.processes), default=0)


def _saved(process: Process) -> list[tuple[float, Saved | CheckpointCalled]]:
    """When a process saved a file, or its part of a distributed checkpoint, in seconds."""
    sharded = [each for each in process.timed(CheckpointCalled) if each[1].name != "load"]
    return [*process.timed(Saved), *sharded]


def _latest(run: Run, scratch: Path) -> str:
    """The newest checkpoint of a run that still exists, relative to its folder: the most complete ones count first."""
    newest = (path for least in (2, 1, 0) for path in reversed(_checkpoints(run, least)))
    existing = [path for path in newest if Path(path).exists()]
    return os.path.relpath(existing[0], scratch.resolve()) if existing else ""


def _checkpoints(run: Run, least: int = 0) -> list[str]:
    """The files that a run saved after its first step, the newest last, also under the names that they got afterwards.

    ``least``: with 1, only those with the parameters of a model (no results of an evaluation); with 2, with its optimizer too.
    """
    found: list[tuple[float, str]] = []
    for process in run.processes:
        saved: set[str] = set()
        renamed, begun = "", not process.steps
        for seconds, event in process.events:
            begun |= bool(process.steps) and seconds > process.steps[0].seconds
            if not begun:
                continue
            # Those of Lightning are whole.
            has = isinstance(event, Saved) and (2 * event.whole or bool(event.keys) * (1 + bool(event.moments)))
            if isinstance(event, Saved) and event.path and has >= least:
                saved.add(event.path)
                found.append((seconds, event.path))
            elif isinstance(event, FileRenamed):
                renamed = event.source
            elif isinstance(event, FileWritten) and renamed:
                moved = [path for path in saved if f"{path}/".startswith(f"{renamed}/")]  # it may be a folder
                found += [(seconds, event.path + path.removeprefix(renamed)) for path in moved]
                renamed = ""
    return [path for _, path in sorted(found)]
