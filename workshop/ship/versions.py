"""``workshop versions``: which release of PyTorch, Lightning, transformers or DeepSpeed broke what.

Each set of versions gets an environment of its own in a temporary folder, where every stage's short tests run. What passes with
the lock and fails with the newest versions is followed up: one package after the other goes back to the lock's version, until
the tests pass again.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import open_folder, require_stages
from workshop.run.environment import without_launcher
from workshop.run.processes import family

# What makes each set's environment, for `uv pip install`, in the order in which they run.
DEPENDENCIES = ("--all-extras", "-r", "pyproject.toml")
SETS = {
    "oldest": ("--resolution=lowest-direct", *DEPENDENCIES),
    "lock": ("--require-hashes", "-r", "requirements.lock"),
    "newest": ("--resolution=highest", "--prerelease=disallow", "--upgrade", *DEPENDENCIES),
}
# What shows that a stage works, for pytest: of the daily tests those that train, carry on, or look into a framework.
STAGES = {
    "01": ("tests/test_training.py", "tests/test_restart.py", "-k", "single"),
    "02": ("tests/test_training.py", "tests/test_restart.py", "-k", "not single"),
    "slurm-multinode": ("tests/test_jobs.py", "tests/test_scale.py"),
    "03": ("tests/test_lightning.py",),
    "04": ("tests/test_finetuning.py",),
    "05": ("tests/test_deepspeed.py", "tests/test_deepspeed_jobs.py"),
    "strategies": ("tests/test_strategies.py",),
    "bonus_jax": ("tests/test_jax.py",),
    "check": ("tests/test_exercises.py", "-k", "solution_meets or as_delivered_the_check"),
}
SHOWN = ("python", "torch", "torchvision", "lightning", "torchmetrics", "transformers", "tokenizers", "peft")
SHOWN += ("accelerate", "deepspeed", "numpy", "jax", "optax")
EACH = 6e9  # bytes that an environment takes on the disk, or its part of uv's cache
# Seconds that go at most into making an environment, the tests of a stage, and the search for the package.
INSTALL, STAGE, SEARCH = 1800, 900, 1800
GRACE = 10  # seconds that pytest has for tidying up, when it has to end

LOOK = """
import importlib.metadata as metadata, json, platform
versions = {each.name: each.version for each in metadata.distributions()}
print(json.dumps([{"python": platform.python_version()} | versions, metadata.packages_distributions()]))
"""


@dataclass(frozen=True)
class Environment:
    """An environment with one set of versions.

    Attributes:
        root: the repository that it is for.
        folder: temporary; the environment lies in it, and what runs with it writes there.
        versions: of Python, and of each package in it by its name.
        modules: the packages that bring each name that can be imported.
    """

    root: Path
    folder: Path
    versions: dict[str, str]
    modules: dict[str, list[str]]

    @property
    def python(self) -> Path:
        return _python(self.folder)


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
    _uv()
    # "lock" is also made where something fails with "newest".
    _require_room(len({*named, "lock"} if "newest" in named else named))
    folder = open_folder(output or root / "runs" / "versions", without="versions.json")

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    results = {}
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


def _uv() -> str:
    program = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
    if program is None:
        raise UserError(f"uv makes the environments, and it is not here: {sys.executable} -m pip install uv")
    return program


def _require_room(environments: int) -> None:
    place, needed = tempfile.gettempdir(), environments * EACH
    if (free := shutil.disk_usage(place).free) < needed:
        raise UserError(
            f"{needed / 1e9:.0f} GB of disk are needed, 6 for each environment, and {place} has {free / 1e9:.1f} free; "
            "set TMPDIR to a folder on a larger disk"
        )


# ---------------------------------------------------------------- environments


@contextmanager
def made(name: str, root: Path) -> Iterator[Environment]:
    """Make the environment of a set; it is gone afterwards.

    Args:
        name: of ``SETS``.
        root: the repository whose pyproject.toml or requirements.lock says what goes in.

    Raises:
        UserError: uv cannot make it (the sentence holds what it says), or the tests' packages are not in it.
    """
    python = sys.executable if name != "oldest" else re.search(r"[\d.]+", _project(root)["requires-python"])[0]
    # A short name: the sockets of a practice cluster lie in it, and the length of their paths is limited.
    with tempfile.TemporaryDirectory(prefix="wv-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        (folder / "t").mkdir()
        venv = ["venv", "--quiet", "--no-project", "--python", python, folder / "venv"]
        install = ["pip", "install", "--quiet", "--compile-bytecode", "--python", _python(folder), *SETS[name]]
        if failure := _call_uv(venv, root, folder) or _call_uv(install, root, folder):
            raise UserError(f"uv cannot make the environment of {name}: {failure}")
        environment = look(root, folder)
        if "pytest" not in environment.versions:
            raise UserError(f"{name} holds no pytest: the tests' packages belong to the extras in pyproject.toml")
        try:
            yield environment
        finally:
            _end_strays(folder)


def _end_strays(folder: Path) -> None:
    """End what failed tests have left running; it is known by where its temporary files go."""
    strays = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder / "t"):
                process.kill()
                strays.append(process)
    psutil.wait_procs(strays, timeout=GRACE)


def look(root: Path, folder: Path) -> Environment:
    """What is in the environment in ``folder`` now."""
    done = subprocess.run([_python(folder), "-I", "-c", LOOK], capture_output=True, text=True, check=True)
    versions, modules = json.loads(done.stdout)
    return Environment(root, folder, {_plain(name): each for name, each in versions.items()}, modules)


def _call_uv(arguments: Sequence, root: Path, folder: Path) -> str:
    """Call uv in the repository; return why it failed, or ""."""
    log = folder / "uv.txt"
    # Python takes bytecode by its source's second and length, which two versions that came together into uv's cache may share:
    # here one replaces the other, so their content has to decide.
    surroundings = {**os.environ, "PYC_INVALIDATION_MODE": "CHECKED_HASH"}
    status = _run([_uv(), *arguments], surroundings, root, log, INSTALL)
    if status is None:
        return f"not done after {INSTALL} s"
    return "" if status == 0 else " ".join(log.read_text(errors="replace").split()) or f"exit status {status}"


def _project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def direct_dependencies(root: Path) -> list[str]:
    """The names of the packages that pyproject.toml asks for, extras included."""
    project = _project(root)
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return list(dict.fromkeys(_plain(re.match(r"[\w.-]+", line)[0]) for line in lines))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _python(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


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
    result = {"versions": {}, "stages": {}, "failure": "", "findings": []}
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
    status = _run(command, _surroundings(environment), environment.root, log, seconds)
    row = {"passed": 0, "failed": {}, "skipped": {}, "seconds": round(time.monotonic() - start)}
    last = (log.read_text(errors="replace").splitlines() or [f"exit status {status}"])[-1]
    for case in _cases(report):
        # What could not be imported is a "test" without a class: the whole file.
        test = f"{case.get('file')}::{case.get('name')}" if case.get("classname") else case.get("file")
        problems = [f"{each.get('message')}\n{each.text}" for kind in ("failure", "error") for each in case.iter(kind)]
        if problems:
            row["failed"][test] = "\n".join(problems)[-20_000:]
        elif (skipped := case.find("skipped")) is not None:
            row["skipped"][test] = last = skipped.get("message")
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


def _surroundings(environment: Environment) -> dict[str, str]:
    """The environment variables of tests: what they write outside the repository goes into the temporary folder."""
    outer = {
        name: value
        for name, value in without_launcher(os.environ).items()
        if not name.startswith(("PYTHON", "PYTEST", "WORKSHOP_", "VIRTUAL_ENV", "CONDA"))
    }
    scratch = environment.folder / "t"
    # DeepSpeed's extension is compiled for one torch; a build of another set's must not be taken for it.
    folders = {"TMPDIR": str(scratch), "TORCH_EXTENSIONS_DIR": str(scratch / "torch_extensions")}
    path = f"{environment.python.parent}{os.pathsep}{outer.get('PATH', os.defpath)}"
    python = {"WORKSHOP_PYTHON": str(environment.python), "PYTHONPATH": str(environment.root), "PATH": path}
    return {**outer, **folders, **python, "COLUMNS": "200"}


def _run(command: Sequence, environment: dict[str, str], folder: Path, log: Path, seconds: float) -> int | None:
    """Run a command, its output in the file ``log``; return its exit status, or None where it took too long and was ended.

    It has a session of its own: Ctrl-C comes to this process alone, which then ends all that it has started.
    """
    with open(log, "w") as file:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        members = family(process.pid)  # empty where it has ended by itself
        if members:
            # As by Ctrl-C: pytest then ends its tests, and writes what it knows.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            members = psutil.wait_procs(members, timeout=GRACE)[1]
            for member in {*members, *family(process.pid)}:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
        process.wait()


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
    findings, waiting = [], dict(tests)

    def found(stage: str, sentence: str, package: str = "") -> None:
        findings.append({"stage": stage, "package": package, "sentence": sentence})
        say(f"  {sentence}")
        del waiting[stage]

    for stage, each in tests.items():
        if not run_tests(newest, each)["failure"]:
            found(stage, f"stage {stage} passed when it was repeated: its tests are not steady")
    if waiting and lock is None:
        lock = run_set("lock", waiting, newest.root, say)
    for stage in [*waiting]:
        if lock["failure"]:
            found(stage, f"stage {stage}: nothing to compare with, there is no environment of the lock")
        elif lock["stages"][stage]["failure"]:
            found(stage, f"stage {stage} fails with the lock too")
    candidates = _candidates(newest, lock["versions"], reports) if waiting else []
    end = time.monotonic() + SEARCH
    for package in candidates:
        if not waiting:
            break
        if time.monotonic() > end:
            for stage in [*waiting]:
                found(stage, f"stage {stage}: no package found in {SEARCH // 60} minutes")
            break
        new, old = newest.versions[package], lock["versions"][package]
        say(f"  with {package} {old}")
        try:
            changed = _with(newest, package, old)
        except UserError as error:
            say(f"  {error}")
            continue
        moved = [name for name in _differing(newest.root, newest.versions, changed.versions) if name != package]
        along = "".join(f", and {name} {changed.versions[name]} with it," for name in moved[:3])
        for stage, each in [*waiting.items()]:
            # What hangs need not do so for as long as a whole stage may take.
            seconds = 60 + 3 * lock["stages"][stage]["seconds"]
            if not run_tests(changed, each, seconds)["failure"]:
                found(stage, f"{package} {new} broke stage {stage} (with {old}{along} it passes)", package)
    for stage in [*waiting]:
        found(stage, f"stage {stage}: no single package breaks it, of {', '.join(candidates) or 'none that differ'}")
    return findings


def _differing(root: Path, first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """The direct dependencies that both have, in different versions."""
    return [
        name for name in direct_dependencies(root) if name in second and first.get(name, second[name]) != second[name]
    ]


def _candidates(newest: Environment, locked: Mapping[str, str], reports: str) -> list[str]:
    """The packages that may be to blame: first those whose files the tracebacks name, from the place of the error outwards."""
    files = reversed(re.findall(r"site-packages[/\\](\w+)", reports))
    named = [_plain(package) for module in files for package in newest.modules.get(module, [])]
    named = [name for name in named if locked.get(name, newest.versions[name]) != newest.versions[name]]
    return list(dict.fromkeys([*named, *_differing(newest.root, newest.versions, locked)]))


def _with(newest: Environment, package: str, version: str) -> Environment:
    """The newest environment with one package in another version, and with what has to move for it.

    Raises:
        UserError: uv finds no versions that go together.
    """
    everything = newest.folder / "newest.txt"
    lines = [f"{name}=={each}\n" for name, each in newest.versions.items() if name != "python"]
    everything.write_text("".join(lines))
    python = ["--quiet", "--python", newest.python]
    back = ["pip", "sync", *python, everything]
    # With the project's own dependencies: a torchvision that needs the new torch then moves as well.
    put = ["pip", "install", *python, *DEPENDENCIES, f"{package}=={version}"]
    if failure := _call_uv(back, newest.root, newest.folder) or _call_uv(put, newest.root, newest.folder):
        raise UserError(f"{package} {version} cannot be put back: {failure}")
    return look(newest.root, newest.folder)


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
