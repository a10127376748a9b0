#!/usr/bin/env bash
# Fine-tune with torchrun: one process on each GPU of this machine, or two on the CPU where there is none.
# Options go on to the script; NPROC sets another number of processes:  NPROC=4 exercise3_run_fit_the_model.sh --steps 40
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../../workshop/runner.sh"      # sets $PYTHON

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/exercise3_fit_the_model.py" --help ;; esac

# How many processes? A mistake in the options ends here, in one line, before anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$here/exercise3_fit_the_model.py" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# "python -m torch.distributed.run" is torchrun, of this Python for certain. --local-addr: it would else ask for the address of
# this machine's name, and not every laptop or container can resolve its own.
exec "$PYTHON" -P -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$nproc" \
    "$here/exercise3_fit_the_model.py" "$@"
