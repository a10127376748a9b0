"""Makes the scenarios of any Python program: runs of it, with probes inside each of its processes."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from workshop.check import launching
from workshop.check.evidence.events import Saved
from workshop.check.evidence.run import Run
from workshop.check.forked import Program
from workshop.check.judge import Made, plan
from workshop.check.probes import PROBES, Probe, Recorder, probes_for
from workshop.check.scenarios import SPLIT, WHOLE, Scenario, Split, Unavailable
from workshop.check.subject import Subject
from workshop.run.stillness import Patience

# A program that the check does not know may load a data set, or compute for a minute, before it takes a step.
UNKNOWN = Patience(idle=10, busy=60, total=600)


class ProgramBench:
    """Makes WHOLE and SPLIT of a program of which nothing is known but how it is started; ``place`` is an empty folder."""

    offered_probes: tuple[type[Probe], ...] = PROBES
    before: Callable[[Recorder], None] | None = None  # see ``Program``

    def __init__(
        self, subject: Subject, *, launch: str, nproc: int, on_cpu: bool, place: Path, arguments: Sequence[str] = ()
    ):
        self.subject, self.script, self.text = subject, subject.file, subject.file.read_text()
        self.launch, self.on_cpu, self.place, self.arguments = launch, on_cpu, place, tuple(arguments)
        self.nproc = 1 if launch == "single" else nproc
        self._folders = 0
        self._by_content = False  # whether samples are named by their content, see Run.settle_identity

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that it can make, in the order in which they are made."""
        return (WHOLE, SPLIT)

    def makers(self) -> dict[Scenario[Any], Callable[[Made], object]]:
        """The function that makes each scenario, given what was made before."""
        return {WHOLE: lambda made: self._unknown(), SPLIT: self._split}

    def make(self, scenario: Scenario[Any], made: Mapping[Scenario[Any], Any]) -> Any:
        """Make a scenario, as ``judge.Bench`` says."""
        return self.makers()[scenario](dict(made))

    @cached_property
    def probes(self) -> tuple[type[Probe], ...]:
        """What is observed: that which the rules of the subject need."""
        _, detectors = plan(self.subject, self.offers)
        return probes_for({kind for each in detectors for kind in each.needs}, self.offered_probes, self.text)

    def has(self, option: str) -> bool:
        """Whether the program's text names an option: only then can it be given."""
        return f'"{option}"' in self.text or f"'{option}'" in self.text

    def folder(self) -> Path:
        """A new empty folder for a run."""
        self._folders += 1
        folder = self.place / f"run-{self._folders}"
        folder.mkdir()
        return folder

    def launch_program(
        self, arguments: Sequence[str], *, nproc: int | None = None, scratch: Path | None = None, **changes: Any
    ) -> Run:
        """Run the program; ``changes`` are further fields of ``Program``, such as another script that is run in the same way."""
        launching.prepare(self.probes, self.on_cpu, self.text)
        own = {name: getattr(self, name) for name in ("script", "launch", "probes", "on_cpu", "before")}
        own |= {"nproc": nproc or self.nproc, "scratch": scratch or self.folder()}
        run = launching.run_program(Program(arguments=tuple(map(str, arguments)), **(own | changes)))
        # Samples have the same names in all runs: a short run may not show that each rank has a data set of its own.
        self._by_content |= any(process.identity == "rows" for process in run.processes)
        for process in run.processes:
            process.identity = "rows" if self._by_content else process.identity
        return run

    def _unknown(self, scratch: Path | None = None, dies: bool = False) -> Run:
        return self.launch_program(self.arguments, scratch=scratch, dies=dies, patience=UNKNOWN)

    def _split(self, made: Made) -> Split:
        """Kill the program in the step after its first checkpoint, and start it again in the same folder."""
        whole: Run = made[WHOLE]
        saved = min((seconds for process in whole.processes for seconds, _ in process.timed(Saved)), default=math.inf)
        if not any(step.seconds > saved for process in whole.trained for step in process.steps):
            raise Unavailable("whether it resumes from a checkpoint: it saves none before its last step")
        scratch = self.folder()
        return Split(self._unknown(scratch, dies=True), self._unknown(scratch))
