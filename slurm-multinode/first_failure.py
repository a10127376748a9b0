"""Show the error of the rank that failed first; the errors of other ranks often only report a lost connection.

Slurm:  python first_failure.py runs/NAME-JOB.logs     (the job scripts call this when the training fails)

The log of a failed job has a traceback of each rank and of each torchrun. So write this error at the top of the log.
"""

import fcntl
import json
import os
import re
import sys
from pathlib import Path

# If main() is decorated with @record, a rank that fails writes its error to a file, and torchrun keeps these files below
# --log-dir.
errors = []
for file in Path(sys.argv[1]).rglob("*error*.json"):
    message = json.loads(file.read_text())["message"]
    error = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message
    # When one rank fails, the others fail at almost the same time. An error about a lost connection is only a consequence.
    is_echo = re.search(r"by peer|remote (worker|process)|NCCL", error) is not None
    errors.append((is_echo, file.stat().st_mtime_ns, error.strip()))
if not errors:
    sys.exit()
error = min(errors)[-1]

# Slurm opens the log of a job as the standard error of the job script, and always appends to it. Therefore what is written at
# the top stays there. If standard error is not such a file (PBS, a terminal), print the error at the end instead.
log = Path("/proc/self/fd/2")
if log.is_file() and fcntl.fcntl(2, fcntl.F_GETFL) & os.O_APPEND:
    with log.open("r+b") as file:
        output = file.read()
        file.seek(0)
        file.write(f"the first rank that failed says:\n{error}\n\nthe output of the job:\n".encode() + output)
    print(
        "\nthe error of the rank that failed first is at the top of this log:", error.splitlines()[-1], file=sys.stderr
    )
else:
    print("\nthe first rank that failed says:", error, sep="\n", file=sys.stderr)
