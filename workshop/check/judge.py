"""From a file to a verdict: which runs to make, which rules to ask, and which goal each finding belongs to.

The way through this folder: ``judge`` asks ``launching`` to run the program, with ``recorder`` inside each process; ``rules``
turns the evidence that they leave into findings; ``report`` shows them.
"""

import gc
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from workshop.check import rules
from workshop.check.evidence import Run
from workshop.check.exercises import KEPT, Exercise, find_exercise
from workshop.check.findings import Finding
from workshop.check.real import real_part
from workshop.errors import UserError

BATCH = 8  # samples a step on each process, in the check's runs
EPOCHS = 2


@dataclass
class Verdict:
    """What is known about a program.

    Attributes:
        file: the program.
        exercise: the exercise that it is, or None.
        findings: in the order of what explains the most.
        unchecked: what could not be checked, and why.
        seconds: how long the checking took so far.
        complete: whether all parts of the check have been done.
        unjudged: the goals that nothing on this machine can show.
    """

    file: Path
    exercise: Exercise | None
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    unjudged: set[int] = field(default_factory=set)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_error]

    def goal_of(self, finding: Finding) -> int:
        return self.exercise.goal(finding.kind) if self.exercise else KEPT

    @property
    def first_open(self) -> int | None:
        """The goal of the first finding; None if all are met."""
        return self.goal_of(self.errors[0]) if self.errors else None

    def states(self) -> dict[int, str]:
        """For each goal "met", "open", "blocked" (it cannot be judged while an earlier one is open), or "unjudged" (here)."""
        if not self.exercise:
            return {}
        open_goals = {self.goal_of(finding) for finding in self.errors}
        blocking = bool(self.errors) and self.errors[0].kind in BLOCKING
        first = self.first_open
        states = {}
        for goal in self.exercise.goals:
            if goal == first or (goal in open_goals - {KEPT} and not blocking):
                states[goal] = "open"
            elif (
                blocking or (goal == KEPT and self.errors) or self._rests_on_numbers(goal) or self._needs_launcher(goal)
            ):
                states[goal] = "blocked"
            else:
                states[goal] = "unjudged" if goal in self.unjudged else "met"
        return states

    def _needs_launcher(self, goal: int) -> bool:
        """Whether the goal waits for the part with a real launcher, which comes last, and only where nothing else is open."""
        return self.exercise.kinds.get("not-restarted") == goal and (bool(self.errors) or not self.complete)

    def _rests_on_numbers(self, goal: int) -> bool:
        """Whether the goal's figures could not be judged, because what they rest on is wrong."""
        return self.exercise.goal("metric-wrong") == goal and bool({finding.kind for finding in self.errors} & NUMBERS)


# While one of these is open, nothing else can be judged.
BLOCKING = {
    "crash",
    "hang",
    "endless",
    "no-training",
    "output-flood",
    "outside-write",
    "no-group",
    "wrong-group",
    "collectives-differ",
    "address-overwritten",
    "job-refused",
    "directive-ignored",
    "job-shape",
    "one-node-only",
    "separate-groups",
    "still-torchrun",
    "not-requeued",
    "no-warning",
    "trainer-idle",
    "step-missing",
    "not-sharded",
    "not-saved",
    "engine-idle",
    "accelerator-idle",
}

# While one of these is open, the figures that a run reports cannot be right.
NUMBERS = {
    "gradients-differ",
    "weights-differ",
    "gradient-scale",
    "differs-from-one-process",
    "accumulation-uneven",
    "accumulation-scale",
    "gradients-pile-up",
    "no-learning",
    "wrong-parameters",
}


def check_file(
    path: Path,
    *,
    launch: str = "",
    nproc: int = 2,
    on_cpu: bool = True,
    arguments: list[str] | None = None,
    quick: bool = False,
) -> Iterator[Verdict]:
    """Check a program; yield the verdict after the quick goals, and again when all is done.

    Args:
        path: the program.
        launch: for a program that is no exercise: "torchrun", "spawn" or "single".
        nproc: the number of processes.
        on_cpu: hide the GPUs.
        arguments: options for a program that is no exercise.
        quick: leave out what needs a real launcher.

    Raises:
        UserError: the file cannot be checked.
    """
    if path.suffix == ".sh":
        from workshop.check.job_rules import check_job

        yield from check_job(path, quick)
        return
    script = readable_program(path)
    exercise = find_exercise(script)
    if exercise is None and not launch:
        raise UserError(
            f"{path} is no exercise; say how it is started: workshop check {path} --launch torchrun -- OPTIONS"
        )
    start = time.monotonic()
    gc.disable()  # collections take a tenth of the time of these imports, and find nothing
    from workshop.check import launching  # imports torch

    launching.prepare(script, on_cpu)
    gc.enable()
    place = Path(tempfile.mkdtemp(prefix="workshop-check-"))
    verdict = Verdict(script, exercise)
    runner = _Runs(script, exercise, launch or exercise.launch, nproc, on_cpu, place)
    try:
        if exercise is None:
            _generic(verdict, runner, arguments or [])
        elif exercise.launch == "single":
            _one_device(verdict, runner)
        elif exercise.name.startswith("04_"):
            from workshop.check.rules_fsdp import check_sharded

            check_sharded(verdict, runner)
        elif exercise.name.endswith("_deepspeed.py"):
            from workshop.check.rules_zero import check_zero_program

            check_zero_program(verdict, runner)
        else:
            _several(verdict, runner)
        verdict.seconds = time.monotonic() - start
        real = not quick and exercise is not None and real_part(exercise)
        if real and verdict.errors:
            verdict.unchecked.append("what needs a real launcher: first the findings above")
        verdict.complete = not real or bool(verdict.errors)
        yield verdict
        if not verdict.complete:
            verdict.findings = ordered(verdict, [*verdict.findings, *real(script, exercise, place, on_cpu)])
            verdict.seconds, verdict.complete = time.monotonic() - start, True
            yield verdict
    finally:
        shutil.rmtree(place, ignore_errors=True)


def readable_program(path: Path) -> Path:
    """The program's full path.

    Raises:
        UserError: it is missing, a folder, a notebook, no Python, or does not parse.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it")
    if path.suffix == ".ipynb":
        raise UserError(f"{path} is a notebook; the check is for the scripts that it works on")
    if path.suffix != ".py":
        raise UserError(f"{path} is neither a Python program nor a job script (.sh)")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    try:
        compile(text, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise UserError(
            f"{path}{f', line {line}' if line else ''}: {getattr(error, 'msg', error)}; Python cannot read it"
        ) from error
    return path.resolve()


class _Runs:
    """Makes the runs of one check."""

    def __init__(self, script, exercise, launch, nproc, on_cpu, place):
        self.script, self.exercise, self.launch, self.nproc, self.on_cpu, self.place = (
            script,
            exercise,
            launch,
            nproc,
            on_cpu,
            place,
        )
        self.text = script.read_text()
        self.count = 0

    def has(self, option: str) -> bool:
        """Whether the program knows an option: what it does not know it could not be given."""
        return f'"{option}"' in self.text or f"'{option}'" in self.text

    def of(self, script: Path) -> "_Runs":
        """Runs of another exercise's program, in the same place."""
        exercise = find_exercise(script)
        return _Runs(script, exercise, exercise.launch, self.nproc, self.on_cpu, self.folder())

    def folder(self) -> Path:
        self.count += 1
        folder = self.place / f"run-{self.count}"
        folder.mkdir()
        return folder

    def run(
        self,
        *,
        nproc=None,
        epochs=EPOCHS,
        batch=BATCH,
        accumulate=1,
        scratch=None,
        nodes=1,
        fails=False,
        dies=False,
        devices=True,
        options=(),
    ) -> Run:
        """Run the exercise with these options, as far as it has them."""
        from workshop.check import launching

        nproc = nproc or self.nproc
        given, options = options, []
        for name, value in (
            ("--epochs", epochs),
            ("--batch-size", batch),
            ("--accumulate", accumulate),
            ("--snapshot", "run.ckpt" if "lightning" in self.exercise.name else "run.pt"),
            ("--folder", "run"),
            ("--devices", nproc // nodes),
            ("--nodes", nodes),
            ("--nproc", nproc if self.launch == "spawn" else None),
        ):
            if value is not None and self.has(name):
                options += [name, str(value)]
        options += [*self.exercise.options, *given]
        run = launching.run_program(
            self.script,
            options,
            launch=self.launch,
            nproc=nproc,
            scratch=scratch or self.folder(),
            nodes=nodes,
            samples=BATCH * self.nproc * 9 // 2,  # four and a half global batches
            on_cpu=self.on_cpu,
            fails=fails,
            dies=dies,
            devices=devices,
        )
        run.accumulate = accumulate
        return run


def _several(verdict: Verdict, runs: _Runs) -> None:
    """The quick goals of an exercise with several processes."""
    exercise = verdict.exercise
    accumulate = 2 if runs.has("--accumulate") else 1
    whole = runs.run(accumulate=accumulate)
    found = rules.trainer(whole) if "trainer-idle" in exercise.kinds else []
    if "accelerator-idle" in exercise.kinds:
        from workshop.check.rules_zero import accelerator

        found += accelerator(whole)
    found += rules.main_findings(whole, exercise=True, expected_accumulation=accumulate)
    verdict.findings = ordered(verdict, found)
    if rules.ending(whole) or any(finding.kind in BLOCKING for finding in found):
        return
    if runs.has("--snapshot") or runs.has("--folder"):
        found += _in_two_parts(runs, whole, accumulate)
    single = runs.run(nproc=1, epochs=1, batch=BATCH * runs.nproc * accumulate)
    if rules.has_batchnorm(whole):
        verdict.unchecked.append(
            "whether one process computes the same: BatchNorm takes the batch of each process for itself"
        )
        found += rules.loss_scale(whole, single)
    elif single.trained:
        found += rules.one_process(whole, single) + rules.ports(whole, single)
    else:
        verdict.unchecked.append("whether one process computes the same: with one process it does not train")
    if "device-index" in exercise.kinds:
        found += rules.devices(runs.run(nproc=4, nodes=2, epochs=1, batch=4), 2)
    if "traceback-hidden" in exercise.kinds:
        found += rules.told(runs.run(epochs=1, fails=True))
    if "stem-shrinks" in exercise.kinds:
        found += rules.images(whole, 3, 32)
    if "precision" in exercise.kinds:
        found += _precision(verdict, whole)
    if "schedule-flat" in exercise.kinds:
        found += rules.cycle(whole)
    if "best-lost" in exercise.kinds:
        found += rules.monitoring(whole)
    if "nodes-ignored" in exercise.kinds:
        found += rules.nodes(runs.run(nproc=4, nodes=2, epochs=1, batch=4, devices=False))
    found += _figures(verdict, whole, judge={finding.kind for finding in found}.isdisjoint(NUMBERS))
    verdict.findings = ordered(verdict, found)


def _figures(verdict: Verdict, run: Run, judge: bool = True) -> list[Finding]:
    """Findings about the reported figures, their values only if ``judge``; what cannot be compared is said."""
    metric = verdict.exercise.metric
    if not metric:
        return []
    missing = rules.missing_metric(run, metric)
    if missing or not judge:
        return missing
    reason = rules.unjudged_figures(run)
    if reason:
        verdict.unchecked.append(f"the reported figures ({reason})")
    return rules.figures(run)


def _in_two_parts(runs: _Runs, whole: Run, accumulate: int = 1) -> list[Finding]:
    """What shows when a run is stopped after an epoch and started again."""
    scratch = runs.folder()
    if "schedule-flat" in runs.exercise.kinds:
        # A run of fewer epochs has another schedule: it is killed after its first snapshot.
        first = runs.run(accumulate=accumulate, scratch=scratch, dies=True)
    else:
        first = runs.run(epochs=1, accumulate=accumulate, scratch=scratch)
    second = runs.run(accumulate=accumulate, scratch=scratch)
    return rules.snapshots(whole, EPOCHS) + rules.ports(whole, first) + rules.resumed(whole, first, second)


def ordered(verdict: Verdict, findings: list[Finding]) -> list[Finding]:
    """Without repetition, errors before hints; what blocks first, then in the order of the goals."""
    unique = list({(finding.kind, finding.seen): finding for finding in findings}.values())

    def rank(finding):
        goal = verdict.exercise.goal(finding.kind) if verdict.exercise else 0
        return (not finding.is_error, finding.kind not in BLOCKING, goal if goal != KEPT else 99)

    return sorted(unique, key=rank)


def _one_device(verdict: Verdict, runs: _Runs) -> None:
    """The quick goals of an exercise with one process."""
    whole = runs.run(nproc=1)
    found = rules.main_findings(whole, exercise=True)
    verdict.findings = ordered(verdict, found)
    if any(finding.kind in BLOCKING for finding in found):
        return
    found += _in_two_parts(runs, whole) + _figures(verdict, whole)
    if "host-sync" in verdict.exercise.kinds:
        found += rules.loading(whole) + rules.waiting(whole) + _precision(verdict, whole)
    verdict.findings = ordered(verdict, found)


def _precision(verdict: Verdict, run: Run) -> list[Finding]:
    """Whether it computes in bfloat16, where the device is fast at it."""
    if rules.bf16_is_fast(run):
        return rules.dtypes(run)
    verdict.unjudged.add(verdict.exercise.goal("precision"))
    verdict.unchecked.append("bfloat16: the device that it trains on here is not fast at it")
    return []


def _generic(verdict: Verdict, runs: _Runs, arguments: list[str]) -> None:
    """What can be said of any program."""
    from workshop.check import launching

    def go(scratch, dies=False):
        return launching.run_program(
            runs.script,
            arguments,
            launch=runs.launch,
            nproc=1 if runs.launch == "single" else runs.nproc,
            scratch=scratch,
            on_cpu=runs.on_cpu,
            dies=dies,
            patience=launching.Patience(idle=10, busy=60, total=600),
        )

    run = go(runs.folder())
    found = rules.main_findings(run, exercise=False) + rules.snapshots(run, None)
    verdict.findings = ordered(verdict, found)
    verdict.unchecked += [
        "the figures that it prints (the check does not know what they stand for)",
        "whether one process computes the same",
        "a real launcher: kill -9, a second machine",
    ]
    if rules.ending(run) or any(finding.kind in BLOCKING for finding in found):
        return
    if rules.saved_before_the_end(run):
        # Killed in the step after the first snapshot, and started again: it should end like the run without a break.
        scratch = runs.folder()
        first = go(scratch, dies=True)
        verdict.findings = ordered(verdict, [*found, *rules.resumed(run, first, go(scratch))])
    else:
        verdict.unchecked.append("whether it carries on from a snapshot: it saves none before its last step")
