"""Measure how long the check takes for programs of the referee; print JSON.

    PYTHONPATH=tests python -m check.bank.seconds [EVERY]

It takes the first named mistake of every third program (EVERY: of every EVERY-th). It runs the program as its owner would, then
checks it, TIMES times in turn. "alone" is how long the program takes alone, "first" how long it takes until the check prints its
first error, and "all" how long the whole check takes. All are seconds of a new process.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from check.bank.referee import SCORE, Version, versions
from workshop.run.machine import machine

TIMES = 2
LONGEST = 300  # seconds of a program; a longer one is left out


def main() -> None:
    """Measure the programs, and print the result as JSON."""
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    rows: list[dict[str, Any]] = []
    for version in _chosen(every):
        with tempfile.TemporaryDirectory(prefix="referee-") as place:
            measured = [_measured(version, Path(place) / str(number)) for number in range(TIMES)]
        if all(measured):
            row = {"program": f"{version.shape}/{version.name}"}
            rows.append(row | {name: [each[name] for each in measured] for name in measured[0]})
            print(rows[-1], file=sys.stderr, flush=True)
    later = {
        name: [statistics.mean(row[name]) - statistics.mean(row["alone"]) for row in rows] for name in ("first", "all")
    }
    head = {"machine": machine(), "command": f"python -m check.bank.seconds {every}", "programs": len(rows)}
    for name, values in later.items():
        numbers = {"median": statistics.median(values), "least": min(values), "most": max(values)}
        head[f"{name} - alone"] = {which: round(value, 1) for which, value in numbers.items()}
    head["first error within 5 s of the end of the program"] = sum(value <= 5 for value in later["first"])
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    print(json.dumps(head, indent=1)[:-2] + f',\n "seconds": [\n  {lines}\n ]\n}}')


def _chosen(every: int) -> list[Version]:
    named = {(row["shape"], row["name"]) for row in json.loads(SCORE.read_text())["rows"] if row.get("named")}
    firsts: dict[str, Version] = {}
    for version in versions():
        if (version.shape, version.name) in named:
            firsts.setdefault(version.shape, version)
    return list(firsts.values())[::every]


def _measured(version: Version, folder: Path) -> dict[str, float]:
    """The seconds of one run, and of one check; empty if the program takes too long, or the check prints no error."""
    for name in ("alone", "checked"):
        version.write(folder / name)
    script = [sys.executable, "-m", "torch.distributed.run", *version.start[1:]]
    start = script if version.start[0] == "torchrun" else [sys.executable, *version.start[1:]]
    alone = _seconds(start, folder / "alone")
    command = [sys.executable, "-P", "-m", "workshop", "check", "--device", "cpu", "--", *version.start]
    first = _seconds(command, folder / "checked", until="kind ")
    complete = _seconds(command, folder / "checked") if first else 0.0
    return {"alone": alone, "first": first, "all": complete} if alone and first and complete else {}


def _seconds(command: Sequence[str], folder: Path, until: str = "") -> float:
    """How long a command takes, or until it prints this text; 0: it takes too long, or does not print it."""
    begun = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert process.stdout
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
    signal.alarm(LONGEST)
    seen = next((time.monotonic() for line in process.stdout if until and line.strip().startswith(until)), 0.0)
    if until:
        process.send_signal(signal.SIGTERM)
    process.communicate()
    process.wait()
    killed = signal.alarm(0) == 0
    ended = seen if until else time.monotonic()
    return 0.0 if killed or not ended else round(ended - begun, 2)


if __name__ == "__main__":
    main()
