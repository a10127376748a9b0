#!/usr/bin/env bash
# Train with torchrun: one process on each GPU of this machine, or two on the CPU where there is none.
# Options go on to the script; NPROC sets another number of processes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"      # sets $PYTHON

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/exercise4_find_the_bug_accumulation.py" --help ;; esac

# How many processes? A mistake in the options ends here, in one line, before anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$here/exercise4_find_the_bug_accumulation.py" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "$PYTHON" -P -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$nproc" \
    "$here/exercise4_find_the_bug_accumulation.py" "$@"
