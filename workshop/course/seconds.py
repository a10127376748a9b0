"""Measure how long checks take: python -m workshop.course.seconds prints JSON with seconds for stage 02, and their medians.

Each exercise and each solution is checked six times, quick goals only: three times in a new interpreter ("new"), and three
times in the same interpreter, as with --watch ("watching"). A solution with goals for the real launcher is also checked
completely in a new interpreter; "real_launcher" is the time from the end of the quick goals to the end of the check.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workshop.course.checking import check_file
from workshop.course.exercises import exercises
from workshop.repository import ROOT
from workshop.run.machine import machine

TIMES = 3
NEW = """
import sys, time
from pathlib import Path
from typing import Any
from workshop.course.checking import check_file
for verdict in check_file(Path(sys.argv[1]), quick=sys.argv[2] == "quick"):
    print(time.monotonic(), flush=True)
"""


def main() -> None:
    """Measure the checks, and print the result as JSON."""
    rows: list[dict[str, Any]] = []
    for exercise in (each for each in exercises() if each.stage == "02_pytorch_ddp"):
        for path in (exercise.path, exercise.solution):
            new = [_in_new_interpreter(path, "quick")[0] for _ in range(TIMES)]
            list(check_file(path, quick=True))  # not measured: the first check imports torch
            watching = []
            for _ in range(TIMES):
                start = time.monotonic()
                list(check_file(path, quick=True))
                watching.append(round(time.monotonic() - start, 2))
            row: dict[str, Any] = {"file": str(path.relative_to(ROOT)), "new": new, "watching": watching}
            if path == exercise.solution:
                quick, *complete = _in_new_interpreter(path, "complete")
                if complete:
                    row["real_launcher"] = round(complete[0] - quick, 2)
            print(row, file=sys.stderr)
            rows.append(row)
    medians = {
        name: round(statistics.median(value for row in rows for value in row[name]), 2) for name in ("new", "watching")
    }
    head = {"machine": machine(), "command": "python -m workshop.course.seconds", "median": medians}
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    print(json.dumps(head, indent=1)[:-2] + f',\n "seconds": [\n  {lines}\n ]\n}}')


def _in_new_interpreter(path: Path, part: str) -> list[float]:
    """Return the seconds from the start of Python to each verdict. As usual, Python keeps the modules that it has compiled."""
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-c", NEW, path, part], cwd=ROOT, env=usual, capture_output=True, text=True, check=True
    )
    return [round(float(line) - start, 2) for line in done.stdout.split()]


if __name__ == "__main__":
    main()
