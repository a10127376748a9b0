"""Check one exercise in a process of its own, with a fresh copy of the course and a time limit.

The report reads the course into memory before it runs the first program. A program can therefore change or delete its own copy
of the course, and the copies of the other exercises stay correct.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop.course.exercises import Exercise, stage_files
from workshop.repository import python_path, require_stages
from workshop.run.environment import environment
from workshop.run.processes import adopt_orphans, family, kill_below

LARGEST = 5_000_000  # bytes of a file of the course
LEFT_OUT = {".ipynb_checkpoints", "runs"}
LAST_WORDS = 600  # characters of the output of a check that failed
GRACE = 10  # seconds that a check may need to end its processes after its time limit
# The other variables, which may contain passwords and tokens, are not passed to the programs of learners.
PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TERM", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CC", "CXX"),
    *("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "WORKSHOP_DATA", "WORKSHOP_PYTHON"),
)


@dataclass(frozen=True)
class Outcome:
    """What the process of a check has said: the content of its file; or ``problem``, why there is none.

    Attributes:
        said: see ``workshop.grades.one``; empty if there is a problem.
        problem: why the check did not come to its end.
        late: whether the time limit ended the check.
        seconds: how long it took.
    """

    said: dict[str, Any]
    problem: str
    late: bool
    seconds: float


class Course:
    """The files of this course in memory: those that a check needs."""

    def __init__(self) -> None:
        root = require_stages()
        self.files: dict[str, tuple[bytes, os.stat_result]] = {}
        for name in ("workshop", "solutions", *stage_files()):
            for place, folders, files in os.walk(root / name):
                folders[:] = [each for each in folders if each not in LEFT_OUT]
                for path in (Path(place, each) for each in files):
                    if path.suffix != ".ipynb" and path.is_file() and path.stat().st_size <= LARGEST:
                        self.files[str(path.relative_to(root))] = (path.read_bytes(), path.stat())
        self.files["pyproject.toml"] = ((root / "pyproject.toml").read_bytes(), (root / "pyproject.toml").stat())

    def write(self, folder: Path) -> None:
        """Write all files into a new folder."""
        for name, (content, status) in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(status.st_mode & 0o777 | 0o600)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # so that the compiled modules are valid


def check_alone(course: Course, exercise: Exercise, files: Mapping[str, bytes], limit: float) -> Outcome:
    """Check the files of a learner in a copy of the course.

    Args:
        course: the course.
        exercise: the exercise.
        files: its files by name; those that are missing are taken from the course.
        limit: seconds after which the check and everything that it has started is ended.
    """
    start = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="wr-"))  # short, because sockets below it have long paths
    earlier = {member.pid for member in family(os.getpid())}
    adopt_orphans()
    process = None
    try:
        root, result, log = place / "c", place / "result.json", place / "log"
        (place / "t").mkdir()
        course.write(root)
        _add_files(root, exercise, files)
        command = [sys.executable, "-P", "-m", "workshop.grades.one", exercise.name, str(result)]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                cwd=root,
                env=_variables(root, place / "t"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            text = f"the check was ended after {limit:g} seconds, its time limit"
            return Outcome({}, text, True, time.monotonic() - start)
        said, problem = _read(result, log, status)
        return Outcome(said, problem, False, time.monotonic() - start)
    finally:
        if process and process.poll() is None:
            process.terminate()  # the check ends the programs that it has started
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        kill_below(os.getpid(), spared=earlier)
        shutil.rmtree(place, ignore_errors=True)


def _add_files(root: Path, exercise: Exercise, files: Mapping[str, bytes]) -> None:
    """Write the files of the learner into a copy of the course, and the solutions of the exercises that they import."""
    stage = root / exercise.stage
    for name in exercise.imports:
        shutil.copy(root / "solutions" / exercise.stage / name, stage / name)
    for name, content in files.items():
        (stage / name).unlink(missing_ok=True)
        (stage / name).write_bytes(content)
        (stage / name).chmod(0o755)


def _variables(root: Path, temporary: Path) -> dict[str, str]:
    """Return the environment of a check: without GPUs, so that the points do not depend on the machine."""
    kept = {
        name: value
        for name, value in environment(gpus=False).items()
        if name in PASSED or name.startswith(("LC_", "CUDA_", "HIP_"))
    }
    return kept | {"PYTHONPATH": python_path(root), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}


def _read(result: Path, log: Path, status: int) -> tuple[dict[str, Any], str]:
    """Return what a check has said, or why it said nothing."""
    # A program that ends the process of its check could have written the file itself.
    if status == 0:
        with suppress(OSError, ValueError):
            said = json.loads(result.read_bytes())
            if isinstance(said, dict):
                return said, ""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_WORDS))
        words = " ".join(file.read().decode(errors="replace").split())
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return {}, f"the check itself ended with {how} and gave no result" + (f": {words}" if words else "")
