"""Show the error of the rank that failed first: those of the other ranks often only say that they lost the connection to it.

Slurm:  python first_failure.py runs/NAME-JOB.logs     (the job scripts call it when the training has failed)
"""

import json
import sys
from pathlib import Path

# A rank whose main() is decorated with @record leaves its error in a file; torchrun puts these below its --log-dir.
errors = sorted(Path(sys.argv[1]).rglob("*error*.json"), key=lambda file: file.stat().st_mtime_ns)
for file in errors[:1]:
    error = json.loads(file.read_text())["message"]
    print("\nthe first rank that failed says:", file=sys.stderr)
    print(error["extraInfo"]["py_callstack"] if isinstance(error, dict) else error, file=sys.stderr)
