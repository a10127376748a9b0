#!/usr/bin/env bash
# Train with Lightning and FSDP2: one process on each GPU of this machine, or two on the CPU where there is none.
# Options go on to the script:  run_lightning_fsdp2.sh --epochs 3 --devices 4
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"      # sets $PYTHON

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" "$here/lightning_fsdp2.py" "$@"
