#!/usr/bin/env bash
# Train with torchrun: one process per GPU of this machine, or two processes on the CPU if it has no GPU.
# Options are passed to the script. NPROC sets a different number of processes:  NPROC=4 exercise9_run_find_the_bug_ring.sh --steps 40
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../../workshop/runner.sh"      # sets $PYTHON

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/exercise9_find_the_bug_ring.py" --help ;; esac

# Find the number of processes, and check the options. A mistake in the options ends the runner here, with one line, before
# anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$here/exercise9_find_the_bug_ring.py" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# "python -m torch.distributed.run" is torchrun, and it certainly uses $PYTHON. Without --local-addr, torchrun looks up the
# address of this machine's host name, which fails on some laptops and in some containers.
exec "$PYTHON" -P -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$nproc" \
    "$here/exercise9_find_the_bug_ring.py" "$@"
