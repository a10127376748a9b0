"""How long checks take: python -m workshop.course.seconds prints JSON with the seconds of each exercise of stage 02, and medians.

For each exercise and each solution: three checks of the quick goals, each in a new interpreter ("new"); three in one that stays,
as under --watch ("watching"); and for the solutions that have goals for the real launcher one whole check in a new interpreter,
from the end of its quick goals to its end ("real_launcher").
"""

import json
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
    """Measure, and print."""
    rows: list[dict[str, Any]] = []
    for exercise in (each for each in exercises() if each.stage == "02_pytorch_ddp"):
        for path in (exercise.path, exercise.solution):
            new = [_in_new_interpreter(path, "quick")[0] for _ in range(TIMES)]
            list(check_file(path, quick=True))  # the first imports torch
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
    """The seconds from the start of Python to each verdict."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-c", NEW, path, part], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [round(float(line) - start, 2) for line in done.stdout.split()]


if __name__ == "__main__":
    main()
