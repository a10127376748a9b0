#!/usr/bin/env bash
# Train with mp.spawn: one process per GPU of this machine, or two processes on the CPU if it has no GPU.
# Options are passed to the script:  exercise1_run_multigpu.sh --epochs 3 --nproc 4
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"      # sets $PYTHON

exec "$PYTHON" "$here/exercise1_multigpu.py" "$@"
