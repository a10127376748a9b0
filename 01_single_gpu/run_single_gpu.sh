#!/usr/bin/env bash
# Train in one process, on the GPU if the machine has one, otherwise on the CPU.
# Options are passed to the script:  run_single_gpu.sh --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"         # sets $PYTHON

exec "$PYTHON" "$here/single_gpu.py" "$@"
