#!/usr/bin/env bash
# Train with nn.DataParallel: one process for all GPUs of this machine; on the CPU where there is none.
# Options go on to the script:  run_data_parallel.sh --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"         # sets $PYTHON

exec "$PYTHON" "$here/data_parallel.py" "$@"
