"""Check a case with real runs and record the evidence, or judge the recorded evidence without running anything."""

import fcntl
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from check.bank.case import Case
from workshop.check import command as check_command
from workshop.check import scenarios
from workshop.check.command import subject_of
from workshop.check.evidence import recorded
from workshop.check.evidence.recorded import Recorded
from workshop.check.judge import Bench, judge
from workshop.check.scenarios import Scenario, Unavailable
from workshop.check.verdict import Verdict
from workshop.course import checking
from workshop.course.exercises import find_exercise
from workshop.errors import UserError
from workshop.repository import ROOT

EVIDENCE = ROOT / "tests" / "check" / "rules" / "evidence"
SCENARIOS = {each.name: each for each in vars(scenarios).values() if isinstance(each, Scenario)}
# How a program that is not an exercise is started.
FOREIGN = ["torchrun", "--nproc-per-node=2"]
OPTIONS = {"language_model.py": ["--steps", "12"]}


class RecordingBench:
    """A bench that records the results of a different bench."""

    def __init__(self, bench: Bench, record: Recorded) -> None:
        self.bench, self.record = bench, record
        record.offers = tuple(scenario.name for scenario in bench.offers)

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that the other bench offers."""
        return self.bench.offers

    def make(self, scenario: Scenario[Any], made: Mapping[Scenario[Any], Any]) -> Any:
        """Make a scenario and keep the result, or the reason why it is unavailable."""
        try:
            self.record.made[scenario.name] = self.bench.make(scenario, made)
        except Unavailable as reason:
            self.record.unavailable[scenario.name] = str(reason)
            raise
        return self.record.made[scenario.name]


class ReplayBench:
    """A bench that returns recorded results."""

    def __init__(self, record: Recorded, again: str) -> None:
        self.record, self.again = record, again

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that the bench offered during the recording."""
        return tuple(SCENARIOS[name] for name in self.record.offers)

    def make(self, scenario: Scenario[Any], made: Mapping[Scenario[Any], Any]) -> Any:
        """Return the recorded result of a scenario."""
        if scenario.name in self.record.unavailable:
            raise Unavailable(self.record.unavailable[scenario.name])
        if scenario.name not in self.record.made:
            raise UserError(f"{self.record.name}: {scenario.title} was not recorded; record again: {self.again}")
        return self.record.made[scenario.name]


def check_for_real(case: Case, folder: Path) -> tuple[Verdict, Recorded]:
    """Check a case in a separate folder; return the verdict and the evidence."""
    base, record = ROOT / case.base, Recorded(case.name)
    exercise = find_exercise(base)
    others = [path.name for path in base.parent.iterdir() if path.is_file() and path.suffix != ".toml"]
    names = [exercise.file, *exercise.beside, *exercise.imports] if exercise else [base.name, *others]
    with _place(case, folder) as place:
        for name in names:
            shutil.copy(base.with_name(name), place)
        (place / base.name).write_text(case.source())
        module = checking if exercise else check_command
        recording = lambda of, bench, quick=False: judge(of, RecordingBench(bench, record), quick)  # noqa: E731
        with mock.patch.object(module, "judge", recording):
            if exercise:
                *_, verdict = checking.check_file(place / names[0], quick=not case.real)
            else:
                *_, verdict = check_command.check_command(
                    [*FOREIGN, names[0], *OPTIONS.get(names[0], [])], folder=place
                )
    return verdict, record


@contextmanager
def _place(case: Case, folder: Path) -> Iterator[Path]:
    """The folder of the program: with a runner, one in the repository, because a runner finds the workshop relative to itself."""
    if not case.runner:
        place = folder / Path(case.base).parent.name
        place.mkdir()
        yield place
        return
    place = ROOT / "runs" / f"test-{os.getpid()}"
    place.mkdir(parents=True)
    try:
        exercise = find_exercise(ROOT / case.base)
        runner = shutil.copy((ROOT / case.base).with_name(exercise.runner.name), place)
        Path(runner).write_text(case.edited(Path(runner).read_text(), case.runner))
        yield place
    finally:
        shutil.rmtree(place)


def replayed(case: Case, family: str) -> Verdict:
    """Return the verdict on the recorded evidence of a case."""
    record = evidence(family).get(case.name)
    if record is None:
        raise UserError(f"{case.name}: no evidence was recorded; record it: {command(family)}")
    base = ROOT / case.base
    exercise = find_exercise(base)
    subject = exercise.subject(base) if exercise else subject_of(base)
    *_, verdict = judge(subject, ReplayBench(record, command(family)), quick=not case.real)
    return verdict


def command(family: str) -> str:
    """Return the command that records the evidence of a family again."""
    return f"./workshop.sh test --full tests/check/rules/test_{family}.py --record"


@cache
def evidence(family: str) -> dict[str, Recorded]:
    """Return the recorded evidence of a family, by case."""
    return recorded.read(EVIDENCE / f"{family}.xz", command(family))


def save(family: str, records: Mapping[str, Recorded], names: Iterable[str]) -> None:
    """Add evidence to the file of a family; the file keeps its evidence only for cases with these names."""
    EVIDENCE.mkdir(exist_ok=True)
    lock = os.open(EVIDENCE, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = EVIDENCE / f"{family}.xz"
        try:
            records = {**recorded.read(path, ""), **records}
        except UserError:
            pass  # there is no evidence, or it is of a different version
        recorded.write(path, [records[name] for name in names if name in records], hide)
    finally:
        os.close(lock)


PLACES = {
    str(ROOT): "/repository",
    sys.prefix: "/environment",
    sys.base_prefix: "/python",
    tempfile.gettempdir(): "/tmp",
    socket.gethostname(): "localhost",
}
TEMPORARY = re.compile(r"(?<=workshop-check-)\w+|pytest-of-[^/\s]+/pytest-\d+/(popen-gw\d+/)?[^/\s]+")


def hide(text: str) -> str:
    """Return a text without the paths and names of this machine."""
    for place in sorted(PLACES, key=len, reverse=True):
        text = text.replace(place, PLACES[place])
    return TEMPORARY.sub("place", text)
