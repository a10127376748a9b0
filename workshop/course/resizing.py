"""Run a program that may continue with a different number of ranks, and see what its runner tells torchrun.

The program trains on a few digits, so a run takes about a second. Its runner starts a program that stands in for Python, and that
only writes down how it was called.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.run import get_args_parser

from workshop.check.bench import ProgramBench
from workshop.check.evidence.run import Asked, Run
from workshop.check.evidence.text import Restarted
from workshop.check.judge import Made
from workshop.check.probes import PROBES
from workshop.check.scenarios import RESIZED, RUNNER, SOLVED, WHOLE, Scenario, Unavailable
from workshop.check.subject import Subject
from workshop.course.digits import prepare_digits, small_digits
from workshop.course.exercises import Exercise
from workshop.course.probes import COURSE_PROBES
from workshop.repository import ROOT
from workshop.run.environment import environment

BATCH = 10  # samples per step: 3 ranks cannot have the same number of them
SAMPLES = 46  # four steps of one epoch with 10 samples per step, two with 20; some samples are left over
EPOCHS = 2
SAVE_EVERY = 3  # in the middle of an epoch
OTHER_SIZES = (1, 3)  # numbers of ranks that continue the training of two
ENDPOINTS = ("first:29500", "second:29600")

# Stands in for Python and torchrun: it prints the arguments and the variables of torchrun as one line of JSON.
STAND_IN = """\
#!/bin/sh
case " $* " in
    *" workshop.training.preflight "*) echo 2 ;;
    *torch.distributed.run*|*" torchrun "*|*exercise4_elastic.py*) exec "$REAL_PYTHON" -c "$REPORT" "$@" ;;
esac
"""
REPORT = "import json, os, sys; print('torchrun:', json.dumps([sys.argv[1:], dict(os.environ)]))"


class ResizingBench(ProgramBench):
    """Makes the scenarios of a program that may continue with a different number of ranks."""

    offered_probes = (*PROBES, *COURSE_PROBES)

    def __init__(self, subject: Subject, exercise: Exercise, *, nproc: int, on_cpu: bool, place: Path):
        super().__init__(subject, launch=exercise.launch, nproc=2, on_cpu=on_cpu, place=place)
        prepare_digits()
        self.exercise = exercise
        self.before = small_digits(SAMPLES)

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that this bench can make, in the order in which it makes them."""
        solves = self.script != self.exercise.solution.resolve()
        return (RUNNER, WHOLE, RESIZED, *([SOLVED] if solves else []))

    def makers(self) -> dict[Scenario[Any], Callable[[Made], object]]:
        """Return the function that makes each scenario."""
        return {
            RUNNER: lambda made: self._runner(),
            WHOLE: lambda made: self.traced(self._run(), self._run),
            RESIZED: self._resized,
            SOLVED: lambda made: self._run(script=self.exercise.solution),
        }

    def _run(self, *, nproc: int = 2, scratch: Path | None = None, dies: bool = False, **changes: Any) -> Run:
        """Run the program with those of these options that it has."""
        given = {"--epochs": EPOCHS, "--batch-size": BATCH, "--save-every": SAVE_EVERY, "--checkpoint": "run.pt"}
        arguments = [str(part) for name, value in given.items() if self.has(name) for part in (name, value)]
        return self.launch_program(
            [*arguments, *self.exercise.options],
            nproc=nproc,
            scratch=scratch,
            dies=dies,
            asked=Asked(EPOCHS),
            **changes,
        )

    def _resized(self, made: Made) -> Restarted:
        """Kill a run of two ranks after its first checkpoint, and continue it with the same and with other numbers of ranks.

        Raises:
            Unavailable: the whole run failed.
        """
        if made[WHOLE].failed:
            raise Unavailable("")  # the finding about the whole run says enough
        saved = self.folder()
        first = self._run(scratch=saved, dies=True)
        runs = []
        for nproc in (2, *OTHER_SIZES):
            place = self.folder()
            shutil.copytree(saved, place, dirs_exist_ok=True)
            runs.append(self._run(nproc=nproc, scratch=place))
            if runs[-1].failed:
                break  # one finding is enough
        return Restarted(first, runs[0], tuple(runs[1:]))

    # ------------------------------------------------------------ the runner

    def _runner(self) -> dict[str, str]:
        """Start the runner beside the program for two endpoints, and return what it tells torchrun.

        Raises:
            Unavailable: there is no runner.
        """
        runner = self.script.with_name(self.exercise.runner.name) if self.exercise.runner else None
        if runner is None or not runner.exists():
            raise Unavailable("what its runner does: there is none beside the program")
        first, second = (self._called(runner, endpoint) for endpoint in ENDPOINTS)
        return first | {f"other_{name}": value for name, value in second.items()}

    def _called(self, runner: Path, endpoint: str) -> dict[str, str]:
        """Start a runner with the stand-in, and return the options of torchrun and the variable that separates its stores."""
        place = self.folder()
        (place / "stage" / "solved").mkdir(parents=True)
        (place / "workshop").symlink_to(ROOT / "workshop")
        solved = "/../../workshop/" in runner.read_text()  # a solution is one folder deeper in the repository
        own = place / "stage" / ("solved" if solved else "") / runner.name
        shutil.copy(runner, own)
        shutil.copy(self.script, own.parent)
        for name in ("python", "torchrun"):
            (place / name).write_text(STAND_IN)
            (place / name).chmod(0o755)
        variables = environment(
            gpus=False,
            WORKSHOP_PYTHON=place / "python",
            PATH=f"{place}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            REAL_PYTHON=sys.executable,
            REPORT=REPORT,
            ENDPOINT=endpoint,
            NPROC=2,
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE=None,
        )
        try:
            done = subprocess.run(
                ["bash", own, "--epochs", "1"],
                cwd=place,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=20,
            )
        except subprocess.TimeoutExpired:
            return {"error": "it does not start torchrun within 20 s"}
        calls = [line.removeprefix("torchrun: ") for line in done.stdout.splitlines() if line.startswith("torchrun: ")]
        if not calls:
            return {"error": (done.stderr.strip().splitlines() or ["it starts no torchrun"])[-1]}
        return _options(*json.loads(calls[0]))


def _options(words: list[str], variables: dict[str, str]) -> dict[str, str]:
    """Return how torchrun understands its arguments, and whether each meeting has a store of its own."""
    while words and words[0] in ("-P", "-u", "-m", "torch.distributed.run"):
        words = words[1:]
    try:
        args = get_args_parser().parse_args(words)
    except SystemExit:
        return {"error": f"torchrun does not understand {shlex.join(words)}"}
    names = ("nnodes", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "max_restarts", "standalone")
    own = variables.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")
    return {name: str(getattr(args, name)) for name in names} | {"own_store": own}
