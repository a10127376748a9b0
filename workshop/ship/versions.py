"""``workshop versions``: which release of PyTorch, Lightning, transformers or DeepSpeed broke what.

Each set of versions gets an environment of its own in a temporary folder, where every stage's short tests run. What passes with
the lock and fails with the newest versions is followed up: one package after the other goes back to the lock's version, until
the tests pass again.
"""

import json
import re
import shutil
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from workshop.course.exercises import stage_files
from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import open_folder, require_stages
from workshop.ship.version_sets import (
    SETS,
    Environment,
    direct_dependencies,
    find_uv,
    made,
    plain_name,
    put_back,
    run_to_file,
)

# What shows that a stage works, for pytest: of the daily tests those that train, carry on, or look into a framework.
STAGES = {
    **{stage.partition("_")[0]: file.tests for stage, file in stage_files().items() if file.tests},
    "strategies": ("tests/test_strategies.py",),
    "bonus_jax": ("tests/test_jax.py",),
    "check": ("tests/test_exercises.py", "-k", "solution_meets or as_delivered_the_check"),
}
SHOWN = (
    *("python", "torch", "torchvision", "lightning", "torchmetrics", "transformers", "tokenizers", "peft"),
    *("accelerate", "deepspeed", "numpy", "jax", "optax"),
)
EACH = 6e9  # bytes that an environment takes on the disk, or its part of uv's cache
STAGE, SEARCH = 900, 1800  # seconds that the tests of a stage, and the search for the package, may take


def run_versions(sets: Sequence[str] = (), stages: str = "", output: str | None = None) -> int:
    """Run the stages' tests with each set of versions; return 0 if all passed, else 1.

    Args:
        sets: names of ``SETS``; none for "newest".
        stages: names of ``STAGES``, separated by commas; "" for all.
        output: the folder for versions.json and versions.md; None for runs/versions in the repository.

    Raises:
        UserError: a set or stage is unknown, uv is not there, the disk is too small, or the folder cannot be written.
    """
    from rich.console import Console

    root, console = require_stages(), Console(highlight=False)
    named = _known("the set", sets or ["newest"], SETS)
    chosen = _known("--stage", [name.strip() for name in stages.split(",") if name.strip()] or [*STAGES], STAGES)
    find_uv()
    # "lock" is also made where something fails with "newest".
    _require_room(len({*named, "lock"} if "newest" in named else named))
    folder = open_folder(output or root / "runs" / "versions", without="versions.json")

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    results: dict[str, dict] = {}
    for name in named:
        results[name] = run_set(name, {stage: STAGES[stage] for stage in chosen}, root, say, results.get("lock"))
    summary = {"command": "workshop " + " ".join(sys.argv[1:]), "date": time.strftime("%Y-%m-%d"), "sets": results}
    write_atomically(folder / "versions.json", json.dumps(summary, indent=1))
    write_atomically(folder / "versions.md", page(summary))
    _show(console, folder, summary)
    return 1 if any(result["failure"] or _failed(result) for result in results.values()) else 0


def tidy_up_when_stopped() -> None:
    """Let Ctrl-C, or a kill, end this program with its processes and its 6 GB; a second one does not interrupt that."""

    def stop(*_):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _known(what: str, names: Sequence[str], known: Mapping) -> list[str]:
    for name in names:
        if name not in known:
            raise UserError(f"{what} '{name}' is unknown; choose from: {', '.join(known)}")
    return [name for name in known if name in names]


def _require_room(environments: int) -> None:
    place, needed = tempfile.gettempdir(), environments * EACH
    if (free := shutil.disk_usage(place).free) < needed:
        raise UserError(
            f"{needed / 1e9:.0f} GB of disk are needed, 6 for each environment, and {place} has {free / 1e9:.1f} free; "
            "set TMPDIR to a folder on a larger disk"
        )


# ---------------------------------------------------------------- tests


def run_set(
    name: str,
    selections: Mapping[str, Sequence[str]],
    root: Path,
    say: Callable[[str], None],
    lock: dict | None = None,
) -> dict:
    """Run stages' tests with one set of versions.

    Args:
        name: of ``SETS``.
        selections: the arguments for pytest of each stage.
        root: the repository.
        say: called with each line on how it goes.
        lock: what this function has returned for "lock", if it has: what fails with "newest" is compared with it.

    Returns:
        ``versions``; ``stages``: what ``run_tests`` returns for each; ``failure``: why there is no environment, or "";
        ``findings``: what ``find_packages`` returns.
    """
    result: dict[str, Any] = {"versions": {}, "stages": {}, "failure": "", "findings": []}
    say(f"{name}: making the environment")
    with ExitStack() as stack:
        try:
            environment = stack.enter_context(made(name, root))
        except UserError as error:
            say(f"  {error}")
            return result | {"failure": str(error)}
        result["versions"] = environment.versions
        for stage, arguments in selections.items():
            row = result["stages"][stage] = run_tests(environment, arguments)
            say(f"  {stage}: {cell(row)}")
            for test, report in row["failed"].items():
                say(f"    {test}: {report.splitlines()[0][:200]}")
        if name == "newest" and (failed := _failed(result)):
            tests = {stage: [*row["failed"]] or selections[stage] for stage, row in failed.items()}
            reports = "\n".join(text for row in failed.values() for text in row["failed"].values())
            result["findings"] = find_packages(environment, tests, reports, say, lock)
    return result


def _failed(result: dict) -> dict[str, dict]:
    return {stage: row for stage, row in result["stages"].items() if row["failure"]}


def run_tests(environment: Environment, arguments: Sequence[str], seconds: float | None = None) -> dict:
    """Run pytest with an environment.

    Args:
        environment: whose Python.
        arguments: of pytest: files, tests, options.
        seconds: after which it is ended; None: as many as a stage may take.

    Returns:
        ``passed``: how many tests did; ``failed`` and ``skipped``: the others by their ids, each with its report or the reason;
        ``seconds``; ``failure``: why all this does not count as passed, or "".
    """
    seconds = seconds or STAGE
    report, log = environment.folder / "report.xml", environment.folder / "tests.txt"
    report.unlink(missing_ok=True)
    options = ["-p", "no:cacheprovider", "-m", "not full and not gpu", f"--junit-xml={report}"]
    command = [environment.python, "-m", "pytest", *options, *arguments]
    start = time.monotonic()
    status = run_to_file(command, environment.variables(), environment.root, log, seconds)
    row: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}, "seconds": round(time.monotonic() - start)}
    last = (log.read_text(errors="replace").splitlines() or [f"exit status {status}"])[-1]
    for case in _cases(report):
        # What could not be imported is a "test" without a class: the whole file.
        test = f"{case.get('file')}::{case.get('name')}" if case.get("classname") else case.get("file")
        problems = [f"{each.get('message')}\n{each.text}" for kind in ("failure", "error") for each in case.iter(kind)]
        if problems:
            row["failed"][test] = "\n".join(problems)[-20_000:]
        elif (skipped := case.find("skipped")) is not None:
            row["skipped"][test] = last = skipped.get("message", "")
        else:
            row["passed"] += 1
    failed = len(row["failed"])
    if status is None:
        failure = f"not done after {seconds} s"
    elif failed:
        failure = f"{failed} of {failed + row['passed']} failed"
    else:
        # Where nothing ran at all, nothing was shown.
        failure = "" if status == 0 and row["passed"] else f"nothing ran: {last}"
    return row | {"failure": failure}


def _cases(report: Path) -> list[ElementTree.Element]:
    """The tests in pytest's report; none where it was ended before it had written all of it."""
    try:
        return list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return []


# ---------------------------------------------------------------- which package


def find_packages(
    newest: Environment,
    tests: Mapping[str, Sequence[str]],
    reports: str,
    say: Callable[[str], None],
    lock: dict | None = None,
) -> list[dict]:
    """Find the package that makes tests fail which pass with the lock: each in turn goes back to the lock's version.

    Args:
        newest: the environment in which they fail; changed meanwhile.
        tests: the failing tests of each stage, as arguments for pytest.
        reports: what they say: packages that they name come first.
        say: called with each line on how it goes.
        lock: what ``run_set`` has returned for "lock", if it has run; else it runs with these tests now.

    Returns:
        For each stage ``stage``, ``sentence``, and ``package``: the one that breaks it, or "".
    """
    say("  which package? first the same tests again, then with the lock")
    search = _Search(newest, dict(tests), say)
    search.repeat_tests()
    lock = lock or (run_set("lock", search.waiting, newest.root, say) if search.waiting else {})
    if search.waiting:
        search.compare_with(lock)
    candidates = _candidates(newest, lock["versions"], reports) if search.waiting else []
    end = time.monotonic() + SEARCH
    for package in candidates:
        if search.waiting and time.monotonic() > end:
            search.give_up(f"no package found in {SEARCH // 60} minutes")
        if not search.waiting:
            break
        search.try_package(package, lock)
    search.give_up(f"no single package breaks it, of {', '.join(candidates) or 'none that differ'}")
    return search.findings


class _Search:
    """The stages whose failure is not explained yet, ``waiting``, and what was found for the others, ``findings``."""

    def __init__(self, newest: Environment, waiting: dict[str, Sequence[str]], say: Callable[[str], None]):
        self.newest, self.waiting, self.say = newest, waiting, say
        self.findings: list[dict] = []

    def found(self, stage: str, sentence: str, package: str = "") -> None:
        self.findings.append({"stage": stage, "package": package, "sentence": sentence})
        self.say(f"  {sentence}")
        del self.waiting[stage]

    def give_up(self, reason: str) -> None:
        for stage in [*self.waiting]:
            self.found(stage, f"stage {stage}: {reason}")

    def repeat_tests(self) -> None:
        for stage, tests in [*self.waiting.items()]:
            if not run_tests(self.newest, tests)["failure"]:
                self.found(stage, f"stage {stage} passed when it was repeated: its tests are not steady")

    def compare_with(self, lock: dict) -> None:
        if lock["failure"]:
            self.give_up("nothing to compare with, there is no environment of the lock")
        for stage in [*self.waiting]:
            if lock["stages"][stage]["failure"]:
                self.found(stage, f"stage {stage} fails with the lock too")

    def try_package(self, package: str, lock: dict) -> None:
        """Run the tests with the lock's version of one package; they pass if that package broke them."""
        new, old = self.newest.versions[package], lock["versions"][package]
        self.say(f"  with {package} {old}")
        try:
            changed = put_back(self.newest, package, old)
        except UserError as error:
            self.say(f"  {error}")
            return
        moved = [name for name in _differing(changed.root, self.newest.versions, changed.versions) if name != package]
        along = "".join(f", and {name} {changed.versions[name]} with it," for name in moved[:3])
        for stage, tests in [*self.waiting.items()]:
            # A test that hangs with the newest versions need not take as long as a whole stage may.
            seconds = 60 + 3 * lock["stages"][stage]["seconds"]
            if not run_tests(changed, tests, seconds)["failure"]:
                self.found(stage, f"{package} {new} broke stage {stage} (with {old}{along} it passes)", package)


def _differing(root: Path, first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """The direct dependencies that both have, in different versions."""
    return [
        name for name in direct_dependencies(root) if name in second and first.get(name, second[name]) != second[name]
    ]


def _candidates(newest: Environment, locked: Mapping[str, str], reports: str) -> list[str]:
    """The packages that may be to blame: first those whose files the tracebacks name, from the place of the error outwards."""
    files = reversed(re.findall(r"site-packages[/\\](\w+)", reports))
    named = [plain_name(package) for module in files for package in newest.modules.get(module, [])]
    named = [name for name in named if locked.get(name, newest.versions[name]) != newest.versions[name]]
    return list(dict.fromkeys([*named, *_differing(newest.root, newest.versions, locked)]))


# ---------------------------------------------------------------- the table


def cell(row: dict) -> str:
    """What the table says of a stage: "12 passed, 1 skipped, 30 s"."""
    skipped = f", {len(row['skipped'])} skipped" if row["skipped"] else ""
    return f"{row['failure'] or str(row['passed']) + ' passed'}{skipped}, {row['seconds']} s"


def tables(sets: Mapping[str, dict]) -> list[list[list[str]]]:
    """Two tables as texts, each with its heading: the stages, and the versions of the packages that matter."""
    stages = dict.fromkeys(stage for result in sets.values() for stage in result["stages"])
    outcomes = [
        [stage, *(cell(result["stages"][stage]) if stage in result["stages"] else "-" for result in sets.values())]
        for stage in stages
    ]
    packages = [[name, *(result["versions"].get(name, "-") for result in sets.values())] for name in SHOWN]
    return [[["stage", *sets], *outcomes], [["package", *sets], *packages]]


def notes(sets: Mapping[str, dict]) -> list[str]:
    """What there is to say besides: which package broke what, which tests failed, and which environment could not be made."""
    lines = [finding["sentence"] for result in sets.values() for finding in result["findings"]]
    lines += [result["failure"] for result in sets.values() if result["failure"]]
    for name, result in sets.items():
        for stage, row in _failed(result).items():
            lines += [f"{name}, stage {stage}: {test}" for test in row["failed"] or [row["failure"]]]
    return lines


def page(summary: dict) -> str:
    """versions.md."""
    lines = [f"# Versions, {summary['date']}", "", f"`{summary['command']}`", ""]
    for heading, *rows in tables(summary["sets"]):
        lines += [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows)] + [""]
    return "\n".join([*lines, *(f"- {line}" for line in notes(summary["sets"]))]).rstrip() + "\n"


def _show(console, folder: Path, summary: dict) -> None:
    from rich.table import Table

    for heading, *rows in tables(summary["sets"]):
        table = Table(*heading, box=None, padding=(0, 1), pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
    console.print()
    for line in [
        *notes(summary["sets"]),
        f"The reports of failed tests: {folder / 'versions.json'}; the tables: versions.md",
    ]:
        console.print(line, markup=False, soft_wrap=True)
