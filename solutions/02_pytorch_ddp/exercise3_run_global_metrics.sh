#!/usr/bin/env bash
# Train with torchrun: one process per GPU of this machine, or two processes on the CPU if it has no GPU.
# Options are passed to the script. NPROC sets a different number of processes.
# Example:  NPROC=4 exercise3_run_global_metrics.sh --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../../workshop/runner.sh"      # sets $PYTHON

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/exercise3_global_metrics.py" --help ;; esac

# Find the number of processes, and check the options. A mistake in the options ends the runner here, with one line, before
# anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$here/exercise3_global_metrics.py" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# When a process dies, torchrun stops the other processes and restarts all of them, here up to three times. Each restart needs a
# new store, because in a shared store gloo finds the addresses of the dead processes, and then it often fails to connect.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
max_restarts=3

# "python -m torch.distributed.run" is torchrun, and it certainly uses $PYTHON. Without --local-addr, torchrun looks up the
# address of this machine's host name, which fails on some laptops and in some containers.
exec "$PYTHON" -P -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$nproc" \
    --max-restarts="$max_restarts" "$here/exercise3_global_metrics.py" "$@"
