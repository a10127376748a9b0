"""Run a program that trains on images for a number of epochs, as the check needs it: stages 01 to 03, and Accelerate.

The programs train for few epochs on a small part of the digits, so a run takes about a second.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from workshop.check.bench import ProgramBench
from workshop.check.evidence.run import Asked, Run
from workshop.check.judge import Made
from workshop.check.probes import PROBES
from workshop.check.scenarios import (
    ALONE,
    DEVICES,
    FAILING_RANK,
    KILLS,
    NODES_OPTION,
    SESSION,
    SINGLE,
    SOLVED,
    SPAWNED,
    SPEED,
    SPLIT,
    STARTED,
    TASKS,
    TWO_NODES,
    WHOLE,
    Scenario,
    Split,
    Unavailable,
)
from workshop.check.subject import Subject
from workshop.course import real
from workshop.course.digits import prepare_digits, small_digits
from workshop.course.exercises import Exercise
from workshop.course.probes import COURSE_PROBES

BATCH = 8  # samples per step and process
EPOCHS = 2
CHECKPOINT_OPTIONS = ("--checkpoint", "--snapshot", "--folder")


class EpochsBench(ProgramBench):
    """Makes the scenarios of a program that trains for epochs.

    Args:
        subject: the program.
        exercise: the exercise that the program belongs to.
        nproc: the number of processes.
        on_cpu: hide the GPUs.
        place: an empty folder for all runs.
    """

    offered_probes = (*PROBES, *COURSE_PROBES)

    def __init__(self, subject: Subject, exercise: Exercise, *, nproc: int, on_cpu: bool, place: Path):
        super().__init__(subject, launch=exercise.launch, nproc=nproc, on_cpu=on_cpu, place=place)
        prepare_digits()
        self.exercise = exercise
        self.accumulate = 1
        if self.has("--accumulate"):
            self.accumulate = 2 if nproc == 3 else 3  # not the number of processes, so that a mix-up is seen
        self._lightning = (
            re.search(r"^\s*(?:import|from)\s+(?:pytorch_)?lightning\b", self.text, re.MULTILINE) is not None
        )
        # Batches are left over at the end of an epoch. (Lightning takes a step with those that do not fill one.)
        left = 0.5 if self.accumulate == 1 or self._lightning else 0.5 * self.accumulate
        batches = (4 if self.accumulate == 1 else 2 * self.accumulate) + left
        self.before = small_digits(int(BATCH * nproc * batches))
        # Some exercises save no checkpoint, so the check does not ask whether they resume.
        original = exercise.solution if exercise.solution.exists() else exercise.path
        self._saves = any(f'"{option}"' in original.read_text() for option in CHECKPOINT_OPTIONS)

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that this bench can make, in the order in which it makes them."""
        offers: list[Scenario[Any]] = [WHOLE, *([SPLIT] if self._saves else [])]
        offers.append(DEVICES if self.launch == "single" else SINGLE)
        solves = self.script != self.exercise.solution.resolve()  # otherwise there is nothing to compare it with
        if solves:
            offers.append(SOLVED)
        if self.launch == "torchrun":
            offers += [TWO_NODES, FAILING_RANK, NODES_OPTION, KILLS, STARTED]
        if self.launch == "spawn":
            offers += [DEVICES, FAILING_RANK, SPAWNED]
        if solves:
            offers.append(SPEED)
        if self._lightning:
            # A start inside a Slurm session shows everything that a start outside of one shows.
            offers += [SESSION, TASKS] if self._asks_for(SESSION) else [ALONE]
        return tuple(offers)

    def _asks_for(self, scenario: Scenario[Any]) -> bool:
        """Return whether a goal lists a rule that judges this scenario."""
        rules = (rule for goal in self.subject.goals for rule in goal.rules)
        return any(scenario in each.runs and not each.passive for rule in rules for each in rule.detectors)

    def makers(self) -> dict[Scenario[Any], Callable[[Made], object]]:
        """Return the function that makes each scenario."""
        whole = partial(self._run, accumulate=self.accumulate)
        two_nodes = partial(self._run, nproc=4, nodes=2, epochs=1, batch=4, devices=True)
        script, place = self.script, self.place
        return {
            WHOLE: lambda made: self.traced(whole(), whole),
            SPLIT: lambda made: self._in_two_parts(),
            SOLVED: lambda made: whole(script=self.exercise.solution),
            SINGLE: lambda made: self._run(nproc=1, epochs=1, batch=BATCH * self.nproc * self.accumulate),
            DEVICES: lambda made: self._run(epochs=1, devices=True),
            TWO_NODES: lambda made: two_nodes(),
            NODES_OPTION: lambda made: two_nodes(devices=False),
            FAILING_RANK: lambda made: self._run(epochs=1, fails=True),
            SPAWNED: lambda made: real.spawned(script, self.exercise.solution, place),
            STARTED: lambda made: real.started(script, self.exercise, self.has, place),
            KILLS: lambda made: real.kills(script, self.exercise, place),
            SPEED: lambda made: real.speeds(script, self.exercise.solution, place, gpus=not self.on_cpu),
            ALONE: lambda made: real.alone(script, place),
            SESSION: lambda made: real.in_session(script, place),
            TASKS: lambda made: real.as_tasks(script, place),
        }

    def make(self, scenario: Scenario[Any], made: Mapping[Scenario[Any], Any]) -> Any:
        """Make a scenario; see ``judge.Bench``.

        Raises:
            Unavailable: the whole run failed, or the program lacks an option.
        """
        whole = made.get(WHOLE)
        if whole and whole.failed:
            raise Unavailable("")  # the finding about the whole run says enough
        return super().make(scenario, made)

    def _run(
        self,
        *,
        nproc: int | None = None,
        epochs: int = EPOCHS,
        batch: int = BATCH,
        accumulate: int = 1,
        scratch: Path | None = None,
        nodes: int = 1,
        devices: bool = False,
        fails: bool = False,
        dies: bool = False,
        **changes: Any,
    ) -> Run:
        """Run the program with those of these options that it has."""
        nproc = nproc or self.nproc
        checkpoint = "run.ckpt" if self._lightning else "run.pt"
        given = {
            "--epochs": epochs,
            "--batch-size": batch,
            "--accumulate": accumulate,
            "--checkpoint": checkpoint,
            "--snapshot": checkpoint,  # the name in version 0.1
            "--folder": "run",
            "--devices": nproc // nodes,
            "--nodes": nodes,
            **({"--nproc": nproc} if self.launch == "spawn" else {}),
        }
        arguments = [str(part) for name, value in given.items() if self.has(name) for part in (name, value)]
        metric, images = self.exercise.metric, self.exercise.images
        return self.launch_program(
            [*arguments, *self.exercise.options],
            nproc=nproc,
            scratch=scratch,
            nodes=nodes,
            devices=devices,
            fails=fails,
            dies=dies,
            asked=Asked(epochs if self._saves else None, accumulate, metric, images),
            **changes,
        )

    def _in_two_parts(self) -> Split:
        """Stop a run after one epoch, and start it again in the same folder.

        Raises:
            Unavailable: the program has no option for its checkpoint.
        """
        if not any(map(self.has, CHECKPOINT_OPTIONS)):
            raise Unavailable("whether it resumes from a checkpoint: the program has no option --checkpoint")
        scratch = self.folder()
        run = partial(self._run, accumulate=self.accumulate, scratch=scratch)
        # With a learning-rate schedule, a run of fewer epochs would train differently. Such an exercise is killed instead.
        first = run(dies=True) if self.exercise.interrupted == "killed" else run(epochs=1)
        return Split(first, run())
