"""The base of the benches of Python programs: runs with probes in each of the processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from workshop.check import launching
from workshop.check.evidence.events import Raised
from workshop.check.evidence.run import Run
from workshop.check.forked import Program
from workshop.check.judge import Made, plan
from workshop.check.preloaded import preload
from workshop.check.probes import PROBES, Probe, Recorder, probes_for
from workshop.check.probes.trails import Trails
from workshop.check.scenarios import Scenario
from workshop.check.subject import Subject

ABORTED = "terminated with signal SIGABRT"  # the words of torch.multiprocessing
SOON = 2  # seconds without progress after which a run counts as hanging, if the same run has hung before
TRACED = 150  # seconds of a run after which it is too long for a second run with tracing


class ProgramBench:
    """Runs a program; each subclass makes its scenarios. ``place`` is an empty folder."""

    offered_probes: tuple[type[Probe], ...] = PROBES
    before: Callable[[Recorder], None] | None = None  # see ``Program``
    compiler = False  # whether runs need torch.compile or DTensor, whatever the text says

    def __init__(self, subject: Subject, *, launch: str, nproc: int, on_cpu: bool, place: Path):
        self.subject, self.script, self.text = subject, subject.file, subject.file.read_text()
        self.launch, self.on_cpu, self.place = launch, on_cpu, place
        self.nproc = 1 if launch == "single" else nproc
        self._folders = 0
        self._by_content = False  # whether content identifies samples, see Run.settle_identity
        self._hangs = False  # whether the next run is known to hang

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that it can make, in the order in which they are made."""
        raise NotImplementedError

    def makers(self) -> dict[Scenario[Any], Callable[[Made], object]]:
        """Map each scenario to the function that makes it from the earlier ones."""
        raise NotImplementedError

    def make(self, scenario: Scenario[Any], made: Mapping[Scenario[Any], Any]) -> Any:
        """Make a scenario; see ``judge.Bench``."""
        return self.makers()[scenario](dict(made))

    @cached_property
    def probes(self) -> tuple[type[Probe], ...]:
        """The probes that the rules of the subject need."""
        _, detectors = plan(self.subject, self.offers)
        return probes_for({kind for each in detectors for kind in each.needs}, self.offered_probes, self.text)

    def has(self, option: str) -> bool:
        """Whether the text of the program names an option, so that the check can pass it."""
        return f'"{option}"' in self.text or f"'{option}'" in self.text

    def folder(self) -> Path:
        """Create a new empty folder for a run."""
        self._folders += 1
        folder = self.place / f"run-{self._folders}"
        folder.mkdir()
        return folder

    def launch_program(
        self, arguments: Sequence[str], *, nproc: int | None = None, scratch: Path | None = None, **changes: Any
    ) -> Run:
        """Run the program; ``changes`` are further fields of ``Program``, such as a different script.

        We have seen once that a process of a correct program ended with SIGABRT, on a busy machine and for an unknown reason.
        So a run in its own folder is repeated once if SIGABRT has ended one of the processes that it has spawned.
        """
        run, _ = self.launch_beside(self.program(arguments, nproc=nproc, scratch=scratch, **changes))
        if scratch is None and any(ABORTED in event.message for event in run.all(Raised)):
            run, _ = self.launch_beside(self.program(arguments, nproc=nproc, **changes))
        return run

    def program(
        self, arguments: Sequence[str], *, nproc: int | None = None, scratch: Path | None = None, **changes: Any
    ) -> Program:
        """Return what ``launch_program`` runs."""
        own = {name: getattr(self, name) for name in ("script", "launch", "probes", "on_cpu", "before")}
        own |= {"nproc": nproc or self.nproc, "scratch": scratch or self.folder()}
        program = Program(arguments=tuple(map(str, arguments)), **(own | changes))
        if self._hangs:
            program = replace(program, patience=replace(program.patience, idle=min(SOON, program.patience.idle)))
        return program

    def launch_beside(self, *programs: Program) -> tuple[Run, list[Run | None]]:
        """Run programs at the same time; see ``launching.run_beside``."""
        launching.prepare(self.probes, self.on_cpu, self.text, self.compiler)
        preload(self.text, self.script.parent, self.place)
        try:
            run, others = launching.run_beside(*programs)
        except launching.GpuOpened:
            self.on_cpu = True  # for the following runs too
            run, others = launching.run_beside(*(replace(each, on_cpu=True) for each in programs))
        # Samples need the same names in all runs, but a short run may not show that each rank has its own data set.
        processes = [process for each in (run, *others) if each for process in each.processes]
        self._by_content |= any(process.identity == "rows" for process in processes)
        for process in processes:
            process.identity = "rows" if self._by_content else process.identity
        return run, others

    def traced(self, run: Run, again: Callable[..., Run]) -> Run:
        """Run a program whose ranks have diverged a second time, and trace its lines.

        Args:
            run: the first run. It counts if it was long, or if the ranks do not part again.
            again: makes the second run; it is called with the probes of that run.
        """
        if run.seconds >= TRACED or not (run.apart or run.elsewhere()):
            return run
        self._hangs = run.hung == "idle"
        second = again(probes=(*self.probes, Trails))
        self._hangs = False
        same = run.failed or not second.failed
        return second if same and (second.apart or second.elsewhere()) else run
