#!/usr/bin/env bash
# Train with mp.spawn: one process on each GPU of this machine, or two on the CPU where there is none.
# Options go on to the script:  exercise1_run_multigpu.sh --epochs 3 --nproc 4
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"      # sets $PYTHON

exec "$PYTHON" "$here/exercise1_multigpu.py" "$@"
