"""Show the error of the rank that failed first: those of the other ranks often only say that they lost the connection to it.

Slurm:  python first_failure.py runs/NAME-JOB.logs     (the job scripts call it when the training has failed)
"""

import json
import re
import sys
from pathlib import Path

# A rank whose main() is decorated with @record leaves its error in a file; torchrun puts these below its --log-dir.
errors = []
for file in Path(sys.argv[1]).rglob("*error*.json"):
    message = json.loads(file.read_text())["message"]
    error = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message
    # All ranks fail within moments. A lost connection is the echo of another rank's error.
    is_echo = re.search(r"by peer|remote (worker|process)|NCCL", error) is not None
    errors.append((is_echo, file.stat().st_mtime_ns, error))
if errors:
    print("\nthe first rank that failed says:", min(errors)[-1], sep="\n", file=sys.stderr)
