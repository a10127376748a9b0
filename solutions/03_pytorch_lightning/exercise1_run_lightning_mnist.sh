#!/usr/bin/env bash
# Train with Lightning: one process per GPU of this machine, or two processes on the CPU if it has no GPU.
# Options are passed to the script:  exercise1_run_lightning_mnist.sh --epochs 3 --devices 4
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../../workshop/runner.sh"      # sets $PYTHON

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" "$here/exercise1_lightning_mnist.py" "$@"
