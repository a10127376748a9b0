"""Fixtures that several tests share, such as the reference runs: each run trains only once per session."""

import os
import signal
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import pytest

# uv, shellcheck and ninja are installed in the environment. Tests start them by name even if it is not activated.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])

import needs
import runs
from workshop.data import codellama

# A process that a shell started in the background ignores Ctrl-C, and so do its children; some tests send Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

EPOCHS = 3
GLOBAL_BATCH = 128


class Reference(NamedTuple):
    """An uninterrupted run: its folder, checkpoint, log and standard output."""

    folder: Path
    checkpoint: Path
    epochs: list
    output: str


def _reference(kind, nproc, folder) -> Reference:
    done = runs.run(
        [
            *runs.command(kind, nproc),
            "--epochs",
            EPOCHS,
            "--batch-size",
            GLOBAL_BATCH // nproc,
            "--checkpoint",
            "run.pt",
        ],
        folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Reference(folder, folder / "run.pt", runs.read_log(folder / "run.pt"), done.stdout)


@pytest.fixture(scope="session")
def single(tmp_path_factory) -> Reference:
    """A run of single_gpu.py: 3 epochs of the digits."""
    return _reference("single", 1, tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="session")
def spawned(tmp_path_factory) -> Reference:
    """A run of exercise1_multigpu.py with 2 processes and the global batches of ``single``."""
    return _reference("spawn", 2, tmp_path_factory.mktemp("spawned"))


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory) -> Reference:
    """A run of exercise2_multigpu_torchrun.py with 2 processes and the global batches of ``single``."""
    return _reference("torchrun", 2, tmp_path_factory.mktemp("torchrun"))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A data folder whose default model has the name of the tiny model but is even smaller."""
    folder = tmp_path_factory.mktemp("data")
    codellama.make_tiny(folder / "models" / codellama.TINY, layers=2, width=64, vocabulary=512)
    return folder


def pytest_addoption(parser):
    parser.addoption(
        "--skipped-in",
        metavar="FILE",
        help="run only the tests that this report (--junit-xml) lists as skipped, and those marked `machine`",
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skip a file of tests that imports a missing package: a machine with a GPU may have only what the tests for GPUs need."""
    report = yield
    error = report.call.excinfo.value.__cause__ if report.failed else None
    if isinstance(error, ModuleNotFoundError) and (name := (error.name or "").partition(".")[0]) in needs.modules():
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: {name} is not installed")
    return report


def pytest_collection_modifyitems(config, items):
    if not (report := config.getoption("--skipped-in")):
        return
    cases = ET.parse(report).iter("testcase")
    skipped = {(case.get("file"), case.get("name")) for case in cases if case.find("skipped") is not None}
    chosen, others = [], []
    for item in items:
        wanted = (item.nodeid.split("::")[0], item.name) in skipped or item.get_closest_marker("machine")
        (chosen if wanted else others).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Print at the end of a run which tests this machine skipped, and what to install."""
    yield
    reports = terminalreporter.stats.get("skipped", [])
    reasons = [
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports if isinstance(report.longrepr, tuple)
    ]
    if reasons:
        terminalreporter.section("not tried on this machine")
        for line in needs.table(reasons):
            terminalreporter.write_line(line)
