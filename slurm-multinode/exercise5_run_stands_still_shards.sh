#!/usr/bin/env bash
# Train with torchrun: one process per GPU of this machine, or two processes on the CPU if it has no GPU.
# Options are passed to the script. NPROC sets a different number of processes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"      # sets $PYTHON

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/exercise5_stands_still_shards.py" --help ;; esac

# Find the number of processes, and check the options. A mistake in the options ends the runner here, with one line, before
# anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$here/exercise5_stands_still_shards.py" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "$PYTHON" -P -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$nproc" \
    "$here/exercise5_stands_still_shards.py" "$@"
