#!/usr/bin/env bash
# Train with nn.DataParallel: one process uses all GPUs of this machine, or the CPU if it has no GPU.
# Options are passed to the script:  run_data_parallel.sh --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"         # sets $PYTHON

exec "$PYTHON" "$here/data_parallel.py" "$@"
