"""Show the error of the rank that failed first; the errors of other ranks often only report a lost connection.

Slurm:  python first_failure.py runs/NAME-JOB.logs     (the job scripts call this when the training fails)
"""

import json
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
    errors.append((is_echo, file.stat().st_mtime_ns, error))
if errors:
    print("\nthe first rank that failed says:", min(errors)[-1], sep="\n", file=sys.stderr)
