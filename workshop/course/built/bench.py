"""Run a program of stage 06 as the check needs it: its training, the same with one process, and its classes alone."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workshop.check.bench import ProgramBench
from workshop.check.evidence.run import Asked, Run
from workshop.check.forked import Program
from workshop.check.judge import Made, plan
from workshop.check.probes import PROBES
from workshop.check.scenarios import BUILT_ALONE, BUILT_CASES, WHOLE, Scenario
from workshop.check.subject import Subject
from workshop.course.built import cases
from workshop.course.built.tracing import StepTracer
from workshop.course.exercises import Exercise
from workshop.run.stillness import Patience

STEPS, LENGTH = 5, 4  # so few tokens that the parameters need more memory than the activations
PATIENCE = Patience(idle=5, busy=20, total=90)


class BuiltBench(ProgramBench):
    """Makes the scenarios of a program of stage 06."""

    offered_probes = (*PROBES, StepTracer)

    def __init__(self, subject: Subject, exercise: Exercise, *, nproc: int, on_cpu: bool, place: Path):
        super().__init__(subject, launch=exercise.launch, nproc=nproc, on_cpu=on_cpu, place=place)
        self.exercise = exercise
        self._beside: dict[Scenario[Any], Run] = {}  # runs beside the whole one

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that this bench can make, in the order in which it makes them."""
        return (WHOLE, BUILT_ALONE, BUILT_CASES)

    def makers(self) -> dict[Scenario[Any], Callable[[Made], object]]:
        """Return the function that makes each scenario."""
        return {
            WHOLE: lambda made: self.traced(self._whole(), self._together),
            BUILT_ALONE: lambda made: self._other(BUILT_ALONE),
            BUILT_CASES: lambda made: self._other(BUILT_CASES),
        }

    def _whole(self) -> Run:
        """Make the whole run and, at the same time, the others. With few cores it waits for messages more than it computes."""
        needed, _ = plan(self.subject, self.offers)
        others = {scenario: self._programs[scenario]() for scenario in needed if scenario != WHOLE}
        run, found = self.launch_beside(self._training(*self.exercise.mesh, nproc=self.processes), *others.values())
        self._beside = {scenario: each for scenario, each in zip(others, found, strict=True) if each}
        return run

    def _other(self, scenario: Scenario[Any]) -> Run:
        """Return a run from beside the whole one, or make it if the whole one has failed."""
        if scenario not in self._beside:
            self._beside[scenario], _ = self.launch_beside(self._programs[scenario]())
        return self._beside[scenario]

    @property
    def _programs(self) -> dict[Scenario[Any], Callable[[], Program]]:
        return {BUILT_ALONE: lambda: self._training(nproc=1), BUILT_CASES: self._cases}

    @property
    def processes(self) -> int:
        """The number of processes of a run: that of the mesh, if the exercise has one."""
        sizes = [int(size) for size in self.exercise.mesh[1::2]]
        return math.prod(sizes) if sizes else self.nproc

    def _together(self, **changes: Any) -> Run:
        run, _ = self.launch_beside(self._training(*self.exercise.mesh, nproc=self.processes, **changes))
        return run

    def _training(self, *options: str, **changes: Any) -> Program:
        given = {
            "--steps": STEPS,
            "--batch-size": 2 * self.nproc,
            "--length": LENGTH,
            "--dtype": "float64",
            "--folder": "run",
        }
        arguments = [str(part) for pair in given.items() for part in pair]
        arguments += [*self.exercise.options, *options]
        return self.program(arguments, patience=PATIENCE, asked=Asked(), **changes)

    def _cases(self) -> Program:
        arguments = [self.exercise.cases, str(self.script)]
        script = Path(cases.__file__)
        return self.program(arguments, nproc=self.processes, script=script, patience=PATIENCE, asked=Asked())
