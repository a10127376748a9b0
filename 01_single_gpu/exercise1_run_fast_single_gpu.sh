#!/usr/bin/env bash
# Train in one process, on the GPU where there is one, else on the CPU.
# Options go on to the script:  exercise1_run_fast_single_gpu.sh --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"         # sets $PYTHON

exec "$PYTHON" "$here/exercise1_fast_single_gpu.py" "$@"
