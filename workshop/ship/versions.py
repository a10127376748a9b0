"""``workshop versions``: find the release of PyTorch, Lightning, transformers or DeepSpeed that broke a stage.

Each set of versions has its own environment in a temporary folder, where the short tests of every stage run. If a stage passes
with the lock but fails with the newest versions, one package at a time goes back to its locked version until the tests pass.
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

# The arguments of pytest that show that a stage works: those daily tests that train, resume, or use internals of a framework.
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
EACH = 6e9  # bytes of disk per environment, or of its part of uv's cache
STAGE, SEARCH = 900, 1800  # seconds, the time limits for the tests of a stage and for the search for the package


def run_versions(sets: Sequence[str] = (), stages: str = "", output: str | None = None) -> int:
    """Run the stages' tests with each set of versions; return 0 if all passed, else 1.

    Args:
        sets: names in ``SETS``; none for "newest".
        stages: names in ``STAGES``, separated by commas; "" for all.
        output: the folder for versions.json and versions.md; None for runs/versions in the repository.

    Raises:
        UserError: a set or stage is unknown, uv is missing, the disk is too small, or the folder cannot be written.
    """
    from rich.console import Console

    root, console = require_stages(), Console(highlight=False)
    named = _known("the set", sets or ["newest"], SETS)
    chosen = _known("--stage", [name.strip() for name in stages.split(",") if name.strip()] or [*STAGES], STAGES)
    find_uv()
    # If something fails with "newest", "lock" is created too.
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
    """Let Ctrl-C or SIGTERM end all processes and remove the 6 GB of files; a second signal does not interrupt this."""

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
            f"{place} needs {needed / 1e9:.0f} GB, 6 for each environment, but only {free / 1e9:.1f} GB are free; "
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
    """Run the tests of stages with one set of versions.

    Args:
        name: a name in ``SETS``.
        selections: the arguments of pytest for each stage.
        root: the repository.
        say: called with each line that reports progress.
        lock: the result of this function for "lock", if there is one, to compare with failures of "newest".

    Returns:
        ``versions``; ``stages``: what ``run_tests`` returns for each; ``failure``: why there is no environment, or "";
        ``findings``: what ``find_packages`` returns.
    """
    result: dict[str, Any] = {"versions": {}, "stages": {}, "failure": "", "findings": []}
    say(f"{name}: creating the environment")
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
        environment: the environment whose Python runs pytest.
        arguments: the arguments of pytest: files, tests, options.
        seconds: the time limit; None: that of a stage.

    Returns:
        ``passed``: the number of tests that passed; ``failed`` and ``skipped``: the other tests by id, with the report or reason;
        ``seconds``; ``failure``: why the run does not count as passed, or "".
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
        # A file that could not be imported appears as a "test" without a class.
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
        failure = f"not finished after {seconds} s"
    elif failed:
        failure = f"{failed} of {failed + row['passed']} failed"
    else:
        # A run without a passed test proves nothing.
        failure = "" if status == 0 and row["passed"] else f"nothing ran: {last}"
    return row | {"failure": failure}


def _cases(report: Path) -> list[ElementTree.Element]:
    """Return the tests in pytest's report; none if pytest was ended before it had written the whole report."""
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
    """Find the package that breaks tests which pass with the lock: set back one package after the other to its version there.

    Args:
        newest: the environment in which the tests fail; its packages are changed.
        tests: the failing tests of each stage, as arguments of pytest.
        reports: the reports of the failures; packages that they name are tried first.
        say: called with each line that reports progress.
        lock: the result of ``run_set`` for "lock"; None: these tests run with the lock now.

    Returns:
        For each stage ``stage``, ``sentence``, and ``package``: the package that breaks it, or "".
    """
    say("  searching for the package: first the same tests again, then with the lock")
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
    search.give_up(f"no single package breaks it (tried: {', '.join(candidates) or 'none, all versions are equal'})")
    return search.findings


class _Search:
    """The stages whose failure is not explained yet (``waiting``), and the explanations for the others (``findings``)."""

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
                self.found(stage, f"stage {stage} passed when it was repeated: its tests are flaky")

    def compare_with(self, lock: dict) -> None:
        if lock["failure"]:
            self.give_up("nothing to compare with, because uv cannot create the environment of the lock")
        for stage in [*self.waiting]:
            if lock["stages"][stage]["failure"]:
                self.found(stage, f"stage {stage} fails with the lock too")

    def try_package(self, package: str, lock: dict) -> None:
        """Run the tests with one package in its version of the lock; if they pass, this package broke them."""
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
            # A shorter limit than for a stage, because a test may hang with these versions.
            seconds = 60 + 3 * lock["stages"][stage]["seconds"]
            if not run_tests(changed, tests, seconds)["failure"]:
                self.found(stage, f"{package} {new} broke stage {stage} (with {old}{along} it passes)", package)


def _differing(root: Path, first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return the direct dependencies that both have in different versions."""
    return [
        name for name in direct_dependencies(root) if name in second and first.get(name, second[name]) != second[name]
    ]


def _candidates(newest: Environment, locked: Mapping[str, str], reports: str) -> list[str]:
    """Return the packages that may be the cause: first those in the tracebacks, from the line of the error outwards."""
    files = reversed(re.findall(r"site-packages[/\\](\w+)", reports))
    named = [plain_name(package) for module in files for package in newest.modules.get(module, [])]
    named = [name for name in named if locked.get(name, newest.versions[name]) != newest.versions[name]]
    return list(dict.fromkeys([*named, *_differing(newest.root, newest.versions, locked)]))


# ---------------------------------------------------------------- the table


def cell(row: dict) -> str:
    """Return the cell of a stage in the table, such as "12 passed, 1 skipped, 30 s"."""
    skipped = f", {len(row['skipped'])} skipped" if row["skipped"] else ""
    return f"{row['failure'] or str(row['passed']) + ' passed'}{skipped}, {row['seconds']} s"


def tables(sets: Mapping[str, dict]) -> list[list[list[str]]]:
    """Return two tables of texts, each with its heading: the stages, and the versions of the main packages."""
    stages = dict.fromkeys(stage for result in sets.values() for stage in result["stages"])
    outcomes = [
        [stage, *(cell(result["stages"][stage]) if stage in result["stages"] else "-" for result in sets.values())]
        for stage in stages
    ]
    packages = [[name, *(result["versions"].get(name, "-") for result in sets.values())] for name in SHOWN]
    return [[["stage", *sets], *outcomes], [["package", *sets], *packages]]


def notes(sets: Mapping[str, dict]) -> list[str]:
    """Return further notes: which package broke what, which tests failed, and which environment could not be created."""
    lines = [finding["sentence"] for result in sets.values() for finding in result["findings"]]
    lines += [result["failure"] for result in sets.values() if result["failure"]]
    for name, result in sets.items():
        for stage, row in _failed(result).items():
            lines += [f"{name}, stage {stage}: {test}" for test in row["failed"] or [row["failure"]]]
    return lines


def page(summary: dict) -> str:
    """Return the text of versions.md."""
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
