"""``workshop gpu-day``: run everything that needs a GPU within some minutes, and write a table, a JSON file and logs.

The command needs a GPU and no network. If a package is missing that only some items need, it reports these items as not run. The
items are in ``gpu_items.py``; ``gpu_runs.py`` runs them.
"""

import importlib.metadata
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import open_folder, packages, require_stages
from workshop.run.environment import environment
from workshop.run.processes import sigterm_interrupts

if TYPE_CHECKING:
    from rich.console import Console

    from workshop.measure.gpu_items import Item
    from workshop.measure.gpu_runs import Day

SUMMARY = "gpu-day.json"
RESERVE = 10  # seconds at the end, in which the last processes end and the table is printed
PATIENCE = 120  # seconds to describe the machine, or to write the data
WIDTH = 150  # characters of the table, if the output is not a terminal
TABLE_FIGURES, TABLE_REASON = 8, 6  # lines of an item in the table; gpu-day.json has more
# Programs whose path contains one of these train the tiny CodeLlama.
NEED_MODEL = ("04_model_parallel_with_fsdp", "strategies", "zero_codellama")


def run_gpu_day(minutes: float, output: str, only: str = "") -> int:
    """Run all items, and return the exit status: 1 if an item failed, else 0.

    Args:
        minutes: the time until the command ends.
        output: the folder for gpu-day.json and the logs.
        only: run only the items whose name contains this text, in upper or lower case.

    Raises:
        UserError: no GPU is visible, the folder cannot be written, or an option is wrong.
    """
    start = time.monotonic()
    if not 0 < minutes < math.inf:
        raise UserError(f"--minutes {minutes:g}: give a number above 0")
    require_stages()
    folder = open_folder(output, without=SUMMARY)
    hardware = describe_hardware()
    gpus = hardware["machine"]["gpus"]
    if not gpus:
        raise UserError(
            "gpu-day needs a GPU, and PyTorch sees none here; the doctor explains why: ./workshop.sh doctor"
        )
    from workshop.measure.gpu_items import all_items

    items = all_items(len(gpus), hardware["gpu_memory"], hardware["float8"])
    chosen = [item for item in items if only.lower() in item.name.lower()]
    if not chosen:
        raise UserError(
            f"--only {only}: no item has this in its name; the items are: {', '.join(i.name for i in items)}"
        )
    return run_day(chosen, folder, start + 60 * minutes, hardware, minutes)


def run_day(items: "Sequence[Item]", folder: Path, end: float, hardware: dict, minutes: float) -> int:
    """Run these items, print the table and write gpu-day.json; return the exit status.

    Args:
        items: what to run.
        folder: the folder for the results, which exists.
        end: when the command must end, on the clock ``time.monotonic``.
        hardware: the description of the machine for gpu-day.json.
        minutes: the minutes that the command was given.
    """
    from rich.console import Console

    from workshop.measure.gpu_runs import FAILED, Day, run_items

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    start = time.monotonic()
    report = Report(console, folder / SUMMARY, [item.name for item in items], hardware | {"minutes": minutes})
    gpus = hardware["machine"]["gpus"]
    console.print(
        f"{len(gpus)} x {gpus[0]}: {len(items)} items in {minutes:g} minutes; logs in {folder}", soft_wrap=True
    )
    scratch_folder = tempfile.TemporaryDirectory(prefix="gpu-day-", ignore_cleanup_errors=True)
    with sigterm_interrupts(), scratch_folder as scratch:
        day = Day(folder, Path(scratch), end - min(RESERVE, (end - start) / 10))
        prepared = prepare(items, day)
        if prepared and prepared["state"] == FAILED:
            report.add(prepared)
        run_items(items, day, report.add)
    show(console, report.rows, time.monotonic() - start)
    return 1 if any(row["state"] == FAILED for row in report.rows) else 0


class Report:
    """Write gpu-day.json after each item, so that nothing is lost if the machine is taken away.

    Args:
        console: where a line is printed for each item that has ended.
        path: the file.
        names: the names of all items, in the order of the rows. Those that have not ended yet are "not run".
        facts: what the file contains in addition to the rows.
    """

    def __init__(self, console: "Console", path: Path, names: list[str], facts: dict):
        self.console, self.path, self.facts = console, path, facts
        self.found = {
            name: {
                "item": name,
                "state": "not run",
                "seconds": 0.0,
                "command": "",
                "figures": [],
                "reason": "not reached",
            }
            for name in names
        }
        self.start = time.monotonic()

    @property
    def rows(self) -> list[dict]:
        """The rows of all items."""
        return list(self.found.values())

    def add(self, row: dict) -> None:
        """Add the row of an item that has ended."""
        self.found[row["item"]] = row
        command = shlex.join(["workshop", *sys.argv[1:]])
        passed = {
            "command": command,
            **self.facts,
            "seconds": round(time.monotonic() - self.start, 1),
            "rows": self.rows,
        }
        write_atomically(self.path, json.dumps(passed, indent=1) + "\n")
        last = (row["reason"].splitlines() or row["figures"][-1:] or [""])[0]
        line = f"{row['state']:8}{row['seconds']:6.0f} s  {row['item']}  {last}"
        self.console.print(line, markup=False, no_wrap=True, overflow="ellipsis")


def describe_hardware() -> dict:
    """Return what to record about this machine. A new process looks, because the process that looks keeps memory on the GPUs."""
    command = [sys.executable, "-P", "-m", "workshop.measure.gpu_hardware"]
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise UserError(f"PyTorch did not say within {PATIENCE} s which GPUs it sees") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"PyTorch cannot say which GPUs it sees: {last}")
    return json.loads(done.stdout.splitlines()[-1]) | {"versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that the course uses."""
    found = {}
    for name in (*packages(), "deepspeed", "pytest"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def prepare(items: "Sequence[Item]", day: "Day") -> dict | None:
    """Write the small model and the data set once, before several items need them at the same time; return the row of this."""
    from workshop.measure.gpu_items import Item
    from workshop.measure.gpu_runs import obstacle_to, run_item

    able = [item for item in items if not obstacle_to(item, day)]
    words = [word for item in able for command in item.commands for word in command]
    options = ["model"] if any(part in word for word in words for part in NEED_MODEL) else []
    if "--dataset=mnist" in words:
        options.append(f"mnist={os.environ.get('WORKSHOP_DATA') or require_stages() / 'data'}")
    if not options:
        return None
    command = [sys.executable, "-P", "-m", "workshop.measure.gpu_data", *options]
    return run_item(Item("preparation", (command,), "", PATIENCE), day)


def show(console: "Console", rows: list[dict], seconds: float) -> None:
    """Print the table: state, time and figures of each item, and why it failed or did not run."""
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", padding=(0, 1))
    for column in ("item", "state", "seconds", "figures"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    styles = {"ok": "green", "failed": "bold red", "not run": "yellow"}
    for row in rows:
        table.add_row(
            Text(row["item"]),
            Text(row["state"], styles[row["state"]]),
            f"{row['seconds']:.0f}",
            Text("\n".join([*row["figures"][-TABLE_FIGURES:], *row["reason"].splitlines()[-TABLE_REASON:]])),
        )
    console.print(table)
    counts = {state: sum(row["state"] == state for row in rows) for state in styles}
    numbers = ", ".join(f"{count} {state}" for state, count in counts.items())
    console.print(f"{numbers}; {seconds:.0f} s", soft_wrap=True)
