#!/usr/bin/env bash
# Train in one process, on the GPU if the machine has one, otherwise on the CPU.
# Options are passed to the script:  exercise1_run_fast_single_gpu.sh --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"         # sets $PYTHON

exec "$PYTHON" "$here/exercise1_fast_single_gpu.py" "$@"
