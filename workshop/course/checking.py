"""Check a file: find the exercise that it belongs to and the bench that runs it, and let the judge decide.

The key ``bench`` of an exercise says which bench runs it: "epochs" for programs that train on images, "steps" for the
language model of stage 04, "engine" for DeepSpeed, "built" for stage 06, "resizing" for a program that may continue with a
different number of ranks, "job" for job scripts.
"""

import gc
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, runtime_checkable

from workshop.check.judge import Bench, judge
from workshop.check.origins import at_origin
from workshop.check.subject import Subject
from workshop.check.verdict import Verdict
from workshop.course.exercises import Exercise, find_exercise, foreign_job
from workshop.errors import UserError
from workshop.files import remove
from workshop.run.imports import no_collections
from workshop.slurm.script import script_text


def check_file(
    path: Path,
    *,
    nproc: int = 2,
    on_cpu: bool = True,
    quick: bool = False,
) -> Iterator[Verdict]:
    """Check a program of an exercise, or a job script; yield the verdict after the quick goals, and again at the end.

    Args:
        path: the file.
        nproc: the number of processes.
        on_cpu: hide the GPUs.
        quick: leave out the goals that need a real launcher.

    Raises:
        UserError: the file cannot be checked.
    """
    file = readable_job(path) if path.suffix == ".sh" else readable_program(path)
    exercise = find_exercise(file)
    if exercise is None and file.suffix != ".sh":
        raise UserError(
            f"{path} is not an exercise; write the command that starts it after --, for example: "
            f"workshop check -- torchrun --nproc-per-node=2 {path}"
        )
    subject = exercise.subject(file) if exercise else foreign_job(file)
    start = time.monotonic()
    with ExitStack() as stack:
        place = Path(tempfile.mkdtemp(prefix="workshop-check-"))
        stack.callback(remove, place)
        with no_collections():
            bench = _bench(subject, exercise, nproc, on_cpu, place)
        if isinstance(bench, Closing):
            stack.callback(bench.close)
        before = time.monotonic() - start
        for verdict in judge(subject, bench, quick):
            verdict.seconds += before
            verdict.findings = [at_origin(finding, file, file.parent) for finding in verdict.findings]
            if verdict.complete and not verdict.errors and (left := todos_left(exercise, file)):
                verdict.unchecked.append(left)
            yield verdict
    if "transformers" in sys.modules:
        gc.collect()  # frees the models: they are in reference cycles


def todos_left(exercise: Exercise | None, file: Path) -> str:
    """Return where TODO comments are still in the files of an exercise, or "". The check cannot see each of their steps."""
    places = []
    for own, _ in exercise.pairs if exercise else ():
        path = file.with_name(own.name)
        lines = path.read_text().splitlines() if path.exists() else []
        numbers = [str(number) for number, line in enumerate(lines, 1) if re.search(r"# +TODO \d", line)]
        places += [f"{path.name}, {'line' if len(numbers) == 1 else 'lines'} {', '.join(numbers)}"] if numbers else []
    return (
        f"the TODO comments that are still there: {'; '.join(places)}. Delete each one that is done" if places else ""
    )


@runtime_checkable
class Closing(Protocol):
    """A bench that must be closed: the one for jobs, which starts a practice cluster."""

    def close(self) -> None:
        """Stop what the bench has started."""


def _bench(subject: Subject, exercise: Exercise | None, nproc: int, on_cpu: bool, place: Path) -> Bench:
    """Return the bench that runs a program. The modules import torch, so only the one that is needed is imported."""
    if exercise is None or subject.file.suffix == ".sh":
        from workshop.course.jobs import JobBench

        return JobBench(subject, exercise, nproc=nproc, on_cpu=on_cpu, place=place)
    if exercise.bench == "steps":
        from workshop.course.text import StepsBench

        return StepsBench(subject, exercise, nproc=nproc, on_cpu=on_cpu, place=place)
    if exercise.bench == "engine":
        from workshop.course.engine import EngineBench

        return EngineBench(subject, exercise, nproc=nproc, on_cpu=on_cpu, place=place)
    if exercise.bench == "built":
        from workshop.course.built.bench import BuiltBench

        return BuiltBench(subject, exercise, nproc=nproc, on_cpu=on_cpu, place=place)
    if exercise.bench == "resizing":
        from workshop.course.resizing import ResizingBench

        return ResizingBench(subject, exercise, nproc=nproc, on_cpu=on_cpu, place=place)
    from workshop.course.benches import EpochsBench

    return EpochsBench(subject, exercise, nproc=nproc, on_cpu=on_cpu, place=place)


def readable_program(path: Path) -> Path:
    """Return the full path of a program that the check can run.

    Raises:
        UserError: the file is missing, a folder, a notebook, not a Python program, or has a syntax error.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it")
    if path.suffix == ".ipynb":
        raise UserError(f"{path} is a notebook; check the program (.py) or the job script (.sh) that it works on")
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
            f"{path}{f', line {line}' if line else ''}: {getattr(error, 'msg', error)}; correct this error first"
        ) from error
    return path.resolve()


def readable_job(path: Path) -> Path:
    """Return the full path of a job script that the check can run.

    Raises:
        UserError: the file is missing, has Windows line endings, is not a script, is for PBS, or bash cannot read it.
    """
    text = script_text(path)
    if not text.startswith("#!"):
        raise UserError(f"{path} must begin with #! and its shell, for example #!/usr/bin/env bash")
    if re.search(r"^#PBS", text, re.MULTILINE):
        raise UserError(f"{path} is for PBS; the check runs scripts for Slurm")
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"bash cannot read the script: {done.stderr.strip().splitlines()[0]}")
    return path.resolve()
