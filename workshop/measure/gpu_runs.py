"""Run the items of ``workshop gpu-day`` within their time limits, and end all processes of an item that exceeds its limit."""

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

from workshop.measure.gpu_items import Item
from workshop.repository import ROOT
from workshop.run.environment import environment
from workshop.run.failures import first_failure
from workshop.run.processes import Outcome, end_family

OK, FAILED, NOT_RUN = "ok", "failed", "not run"
TOGETHER = 4  # items that measure no time run at the same time
SHORTEST = 15  # seconds: with less time left, an item is not started, unless its limit is shorter
GRACE = 2  # seconds that processes get to end after SIGTERM
TIME_IS_OVER = "the time was over"
MARK = "GPU_DAY_ITEM"  # an environment variable that all processes of an item inherit
# Lines with figures, to be shown in the table.
FIGURES = re.compile(
    r"tokens/s|images/s|samples/s|GB/s|differ by at most|out of memory|not measured|\d / [\d,]+\.\d|^(FAILED|ERROR) "
    r"|\d (passed|failed)|weight \d|\| (loss|accuracy|last loss|validation)|efficiency"
)
MOST_FIGURES = 40  # lines
KEPT = (".json", ".csv", ".png")  # files with results that are copied from the working folder of a benchmark


@dataclass(frozen=True)
class Day:
    """When and where the items run.

    Attributes:
        folder: the folder for the logs and results.
        scratch: the folder for everything else, which is deleted at the end. It contains the data sets.
        end: when all items must have ended, on the clock ``time.monotonic``.
        stopping: set it to end all items at once.
    """

    folder: Path
    scratch: Path
    end: float
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.end - time.monotonic()


def run_items(items: Sequence[Item], day: Day, on_row: Callable[[dict], None]) -> None:
    """Run the items in their order: four at a time, but those that measure time alone.

    Args:
        items: what to run.
        day: when and where.
        on_row: called with the row of each item that has ended, as ``run_item`` returns it; never twice at the same time.
    """
    for alone, group in itertools.groupby(items, key=lambda item: item.alone):
        with ThreadPoolExecutor(1 if alone else TOGETHER) as pool:
            try:
                for done in as_completed([pool.submit(run_item, item, day) for item in group]):
                    on_row(done.result())
            except BaseException:
                day.stopping.set()
                raise


def run_item(item: Item, day: Day) -> dict:
    """Run an item, and return its row.

    Returns:
        ``item``: its name; ``state``: "ok", "failed" or "not run"; ``seconds``; ``command``; ``figures``: the lines of its output
        with figures; ``reason``: why it failed or did not run, or "".
    """
    row = {"item": item.name, "state": NOT_RUN, "seconds": 0.0, "command": _shown(item), "figures": [], "reason": ""}
    if obstacle := obstacle_to(item, day):
        return row | {"reason": obstacle}
    place = day.scratch / slug(item.name)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    limit, start = min(item.seconds, day.left), time.monotonic()
    log = day.folder / f"{slug(item.name)}.log"
    status = _run_commands(item, day, place, log, start + limit)
    seconds = time.monotonic() - start
    output = log.read_text(errors="replace")
    row |= {"seconds": round(seconds, 1), "figures": figures(output)}
    if item.alone:
        _keep_results(place, day.folder / slug(item.name))
    if status is None and limit < item.seconds:
        return row | {"reason": f"{TIME_IS_OVER} after {seconds:.0f} s"}
    if status is None:
        last = "\n".join(output.splitlines()[-5:])
        return row | {
            "state": FAILED,
            "reason": f"it still ran after {item.seconds:.0f} s and was ended; its last lines:\n{last}",
        }
    if status:
        reason = first_failure(Outcome(status, output, seconds, 0), place / "torchrun")
        return row | {"state": FAILED, "reason": f"exit status {status}: {reason}"}
    if not re.search(item.shows, output):
        return row | {"state": FAILED, "reason": f"its output has no line with: {item.shows}"}
    return row | {"state": OK}


def slug(name: str) -> str:
    """Return the name of an item as the name of a file."""
    return re.sub(r"\W+", "-", name).strip("-")


def figures(output: str) -> list[str]:
    """Return the last lines of an output that have figures."""
    return [line.strip() for line in output.splitlines() if FIGURES.search(line)][-MOST_FIGURES:]


def _shown(item: Item) -> str:
    """Return the commands of an item as a reader would type them in the top folder of the course."""
    text = " && ".join(shlex.join(command) for command in item.commands)
    return text.replace(sys.executable, "python").replace(f"{ROOT}/", "")


def obstacle_to(item: Item, day: Day) -> str:
    """Return why an item cannot run now, or ""."""
    if item.obstacle:
        return item.obstacle
    if importlib.util.find_spec(item.package) is None:
        return f"{item.package} is not installed"
    if day.stopping.is_set() or day.left < min(SHORTEST, item.seconds):
        return TIME_IS_OVER
    return ""


def _run_commands(item: Item, day: Day, place: Path, log: Path, end: float) -> int | None:
    """Run the commands of an item, and return the exit status of the last one; None: it was ended at its limit."""
    mark = uuid.uuid4().hex
    variables = environment(
        OMP_NUM_THREADS=1,
        PYTHONUNBUFFERED=1,
        HF_HUB_OFFLINE=1,
        WORKSHOP_DATA=day.scratch / "data",
        PET_LOG_DIR=place / "torchrun",
        **{MARK: mark},
    )
    status: int | None = 0
    with open(log, "w") as file:
        for number, command in enumerate(item.commands):
            until = item.until if number == 0 else ""
            status = _run_command(command, day, place, variables, file, end, until)
            if status != 0:
                break
    return status


def _run_command(
    command: list[str], day: Day, place: Path, variables: dict[str, str], log: TextIO, end: float, until: str
) -> int | None:
    """Run a command, and end all its processes; return its exit status, 0 if ``until`` has ended it, None at the limit."""
    process = subprocess.Popen(
        command,
        cwd=place,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(0.1)
            if until and next(place.glob(until), None):
                return 0
            if time.monotonic() > end or day.stopping.is_set():
                return None
    finally:
        end_family(process, GRACE)
        end_marked(variables[MARK])


def end_marked(mark: str) -> None:
    """End the processes that an item has left behind. They are no longer descendants of the program that started them."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=GRACE)


def _keep_results(place: Path, target: Path) -> None:
    """Copy the results of a benchmark, because its working folder is deleted."""
    found = [path for path in place.iterdir() if path.suffix in KEPT and path.is_file()]
    if found:
        target.mkdir(exist_ok=True)
    for path in found:
        shutil.copy(path, os.fspath(target))
