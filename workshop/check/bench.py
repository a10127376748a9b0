"""Makes the scenarios of any Python program: runs of it, with probes inside each of its processes."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

from workshop.check import launching
from workshop.check.evidence.events import Saved
from workshop.check.evidence.run import Asked, Run
from workshop.check.judge import Made, plan
from workshop.check.probes import PROBES, Probe, Recorder, probes_for
from workshop.check.scenarios import SPLIT, WHOLE, Scenario, Split, Unavailable
from workshop.check.subject import Subject
from workshop.run.stillness import Patience

# A program that the check does not know may load a data set, or compute for a minute, before it takes a step.
UNKNOWN = Patience(idle=10, busy=60, total=600)


class RunSettings(TypedDict, total=False):
    """Further settings of ``run_program``."""

    nodes: int
    devices: bool
    fails: bool
    dies: bool
    patience: Patience | None
    asked: Asked | None


class ProgramBench:
    """Makes WHOLE and SPLIT of a program of which nothing is known but how it is started.

    Args:
        subject: the program, and the rules that its probes are chosen for.
        launch: "single", "spawn" or "torchrun".
        nproc: the number of processes.
        on_cpu: hide the GPUs.
        place: an empty folder for all runs.
        arguments: the program's options.

    Attributes:
        text: the program's text.
        offered_probes: the probes to choose from.
        before: called in each process that runs the program, before the probes are installed.
    """

    offered_probes: tuple[type[Probe], ...] = PROBES
    before: Callable[[Recorder], None] | None = None

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
        """Make a scenario; see ``judge.Bench``."""
        return self.makers()[scenario](dict(made))

    @cached_property
    def probes(self) -> tuple[type[Probe], ...]:
        """What is observed: that which the rules of the subject need."""
        _, detectors = plan(self.subject, self.offers)
        needs = {kind for detector in detectors for kind in detector.needs}
        return probes_for(needs, self.offered_probes, self.text)

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
        self,
        arguments: Sequence[str],
        *,
        script: Path | None = None,
        launch: str | None = None,
        nproc: int | None = None,
        scratch: Path | None = None,
        **settings: Unpack[RunSettings],
    ) -> Run:
        """Run the program, or another one in the same way; see ``launching.run_program``."""
        launching.prepare(self.probes, self.on_cpu)
        run = launching.run_program(
            script or self.script,
            arguments,
            launch=launch or self.launch,
            nproc=nproc or self.nproc,
            scratch=scratch or self.folder(),
            probes=self.probes,
            on_cpu=self.on_cpu,
            before=self.before,
            **settings,
        )
        # Samples have the same names in all runs: a short run may not show that each rank has a data set of its own.
        self._by_content = self._by_content or any(process.identity == "rows" for process in run.processes)
        for process in run.processes:
            process.identity = "rows" if self._by_content else process.identity
        return run

    def _unknown(self, scratch: Path | None = None, dies: bool = False) -> Run:
        return self.launch_program(self.arguments, scratch=scratch, dies=dies, patience=UNKNOWN)

    def _split(self, made: Made) -> Split:
        """Kill the program in the step after its first checkpoint, and start it again in the same folder."""
        if not saved_before_the_end(made[WHOLE]):
            raise Unavailable("whether it resumes from a checkpoint: it saves none before its last step")
        scratch = self.folder()
        return Split(self._unknown(scratch, dies=True), self._unknown(scratch))


def saved_before_the_end(run: Run) -> bool:
    """Whether steps follow the first checkpoint."""
    saved = [seconds for process in run.processes for seconds, _ in process.timed(Saved)]
    return bool(saved) and any(step.seconds > min(saved) for process in run.trained for step in process.steps)
