#!/usr/bin/env bash
# shellcheck disable=SC2034  # TODO 1, step f: remove this line when you use nproc and max_restarts below
# Train with torchrun: one process per GPU of this machine, or two processes on the CPU if it has no GPU.
# Options are passed to the script. NPROC sets a different number of processes.
# Example:  NPROC=4 exercise2_run_multigpu_torchrun.sh --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"      # sets $PYTHON

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/exercise2_multigpu_torchrun.py" --help ;; esac

# Find the number of processes, and check the options. A mistake in the options ends the runner here, with one line, before
# anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$here/exercise2_multigpu_torchrun.py" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# TODO 3, step c: when a process dies, torchrun should restart all processes, up to three times. Each restart needs a new
# store, because in a shared store gloo finds the addresses of the dead processes, and then it often fails to connect.
# Look up: torchrun --max-restarts; the variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
max_restarts=0

# TODO 1, step f: let torchrun start $nproc processes on this machine only, with a port that no other program uses. Write
# "$PYTHON" -P -m torch.distributed.run instead of torchrun, so that it runs with the Python of this course.
# Look up: torchrun --help: --standalone, --local-addr (127.0.0.1), --nproc-per-node, --max-restarts ("$max_restarts")
exec "$PYTHON" "$here/exercise2_multigpu_torchrun.py" "$@"
