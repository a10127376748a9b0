#!/usr/bin/env bash
# Train with torchrun: one process on each GPU of this machine, or two on the CPU where there is none.
# Options go on to the script; NPROC sets another number of processes:  NPROC=4 exercise3_run_global_metrics.sh --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../../workshop/runner.sh"      # sets $PYTHON

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/exercise3_global_metrics.py" --help ;; esac

# How many processes? A mistake in the options ends here, in one line, before anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$here/exercise3_global_metrics.py" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# When a process dies, torchrun stops the others and starts all of them again, here up to three times. Each attempt then gets
# a rendezvous store of its own: in a shared one, gloo finds the addresses of the dead processes and often fails to connect.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
max_restarts=3

# "python -m torch.distributed.run" is torchrun, of this Python for certain. --local-addr: it would else ask for the address of
# this machine's name, and not every laptop or container can resolve its own.
exec "$PYTHON" -P -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$nproc" \
    --max-restarts="$max_restarts" "$here/exercise3_global_metrics.py" "$@"
