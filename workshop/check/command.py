"""Check a program with the command that starts it: ``workshop check -- torchrun --nproc-per-node=2 train.py``."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from workshop.check import borrowed
from workshop.check.baseline import sieve
from workshop.check.judge import judge
from workshop.check.origins import at_origin
from workshop.check.report import show_all
from workshop.check.reports import write_reports
from workshop.check.rules.rule import RULES
from workshop.check.settings import settings_of
from workshop.check.start import Start, read_start
from workshop.check.subject import Subject
from workshop.check.verdict import Finding, Verdict
from workshop.errors import UserError
from workshop.files import remove
from workshop.run.environment import why_hidden
from workshop.run.imports import no_collections

# What the check can never judge of a program that it does not know.
UNCHECKED = (
    "the numbers that it prints during the training (the check does not know what they mean)",
    "how the program survives kill -9, and a second machine",
)
# What the check imports besides torch. If the environment of the program lacks a package, the check brings its own.
NEEDED = ("psutil", "rich", "click")
STARTERS = re.compile(r"python[\d.]*|torchrun|accelerate(-launch)?|deepspeed")


def run_command(
    words: Sequence[str], *, device: str, json: bool, verbose: bool, module: str = "workshop.check", **chosen: Any
) -> int:
    """Check the program that a command starts, and show the verdict.

    Args:
        words: the command; empty: the one in pyproject.toml.
        device: "cpu", or "auto": use GPUs if there is one per process.
        json: print JSON instead of text.
        verbose: print tracebacks and stacks.
        module: the module whose command line called this function.
        chosen: the options of which ``settings_of`` makes settings.

    Returns:
        The exit status: 0 if no error was found, 1 otherwise, 2 if nothing could be judged.

    Raises:
        UserError: the program cannot be checked.
    """
    settings = settings_of(words, **chosen)
    sift = sieve(settings)
    unchecked = use_interpreter_of(settings.command, module, settings.folder)
    os.chdir(settings.folder)
    on_cpu = hides_gpus(read_start(settings.command).nproc, device)
    verdicts = check_command(
        settings.command, on_cpu=on_cpu, steps=settings.steps, resume=settings.resume_args, unchecked=unchecked
    )
    verdict = show_all(map(sift, verdicts), json, verbose)
    write_reports(verdict, settings.folder, settings.junit, settings.sarif)
    return verdict.status


def check_command(
    words: Sequence[str],
    *,
    folder: Path | None = None,
    on_cpu: bool = True,
    steps: int | None = None,
    resume: Sequence[str] = (),
    unchecked: str = "",
) -> Iterator[Verdict]:
    """Check the program that a command starts; yield the verdict.

    Args:
        words: the command.
        folder: the folder in which it starts; None: the current folder.
        on_cpu: hide the GPUs.
        steps: the number of optimizer steps after which the run is stopped; None: 30, if the run takes long.
        resume: the arguments with which a second start resumes; ``{latest}`` stands for the newest checkpoint.
        unchecked: something else that is not checked.

    Raises:
        UserError: the command is not understood, or names no Python program.
    """
    original = (folder or Path.cwd()).resolve()
    if original in (Path.home(), Path("/"), Path(tempfile.gettempdir())):
        raise UserError(
            f"the check copies the folder in which it starts; change to that of the program (now: {original})"
        )
    start = read_start(words)
    script = readable(start, original)
    subject = subject_of(script)
    began = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="workshop-check-"))
    try:
        with no_collections():
            from workshop.check.foreign import OwnersBench, Wishes

            bench = OwnersBench(
                subject, start, on_cpu=on_cpu, place=place, original=original, wishes=Wishes(steps, tuple(resume))
            )
        before = time.monotonic() - began
        placed: set[Finding] = set()
        for verdict in judge(subject, bench):
            verdict.seconds += before
            verdict.findings = _one_for_each_line(
                each if each in placed else at_origin(each, script, original) for each in verdict.findings
            )
            placed.update(verdict.findings)
            verdict.unchecked += [unchecked] if unchecked and verdict.complete else []
            yield verdict
    finally:
        remove(place)


def _one_for_each_line(findings: Iterable[Finding]) -> list[Finding]:
    """Return the first finding of each kind that names a line, and all that name none."""
    first: dict[object, Finding] = {}
    for finding in findings:
        first.setdefault((finding.kind, finding.where or finding.seen), finding)
    return list(first.values())


def subject_of(script: Path) -> Subject:
    """Return a program as a subject of the check: without goals, with the rules for any program."""
    return Subject(script, "", (), tuple(rule for rule in RULES.values() if rule.anywhere or rule.always), UNCHECKED)


def readable(start: Start, folder: Path) -> Path:
    """Return the path of the program that a command starts.

    Raises:
        UserError: it is missing, or not a Python program without syntax errors.
    """
    script = start.at(folder).resolve()
    try:
        compile(script.read_text(), str(script), "exec")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{start.target} is not a Python program: {error}") from error
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f", line {line}" if line else ""
        raise UserError(f"{start.target}{place}: {getattr(error, 'msg', error)}; correct this error first") from error
    return script


def devices() -> int:
    """Return the number of GPUs. A subprocess counts them: after this process had used CUDA, its forks could not."""
    if not any(os.path.exists(place) for place in ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")):
        return 0
    code = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout.strip() or 0)


def hides_gpus(processes: int, device: str) -> bool:
    """Return whether the check hides the GPUs from these processes, and say so if it has fewer GPUs than processes.

    Args:
        processes: the number of processes of a run.
        device: "cpu", or "auto": use GPUs if there is one per process.
    """
    if device == "cpu":
        return True
    count = devices()
    if hidden := why_hidden(processes, count):
        print(hidden, file=sys.stderr)
    return count < processes


def use_interpreter_of(words: Sequence[str], module: str, folder: Path = Path()) -> str:
    """Continue in the Python environment in which the command would run, if it is a different one with torch.

    Args:
        words: the command.
        module: the module whose command line starts again there.
        folder: the folder in which the command starts.

    Returns:
        What is not checked, because the check cannot run there; "" otherwise.
    """
    python = _interpreter(words, folder)
    if not python or os.path.realpath(os.path.dirname(python)) == os.path.realpath(os.path.dirname(sys.executable)):
        return ""
    folders = {"workshop": str(Path(__file__).resolve().parents[2])}
    for name in NEEDED:
        spec = importlib.util.find_spec(name)
        folders[name] = str(Path(spec.origin or "").parents[1]) if spec else ""
    command = [python, borrowed.__file__, json.dumps(folders)]
    done = subprocess.run(command, capture_output=True, text=True)
    prefix, missing = json.loads(done.stdout) if done.returncode == 0 else ("", ["torch"])
    if prefix == sys.prefix or "torch" in missing:
        return ""  # this environment (``python`` was a link or a shim), or nothing that the program could run in
    if missing:
        lacks = f"{python} lacks {', '.join(missing)}"
        return f"the program in its own environment, because {lacks}; install it there, and check again"
    sys.stdout.flush()
    os.execv(python, [*command, module, *sys.argv[1:]])


def _interpreter(words: Sequence[str], folder: Path) -> str:
    """The Python interpreter that a command uses: the one that it names, or that of its launcher; "" if none is found.

    The check may lack the launcher (accelerate), so this does not read the command.
    """
    name = next((word for word in words if STARTERS.fullmatch(os.path.basename(word))), "python")
    found = shutil.which(folder / name if os.sep in name else name) or ""
    beside = os.path.join(os.path.dirname(found), "python")
    if os.path.basename(name).startswith("python"):
        return found
    return beside if found and os.path.exists(beside) else ""
