#!/usr/bin/env bash
# Be one node of a training. Start this on each node, with the same ENDPOINT: the host and port at which the nodes meet, by
# default 127.0.0.1:29400. On one machine, a terminal can be a node:  NPROC=1 exercise4_run_elastic.sh --epochs 20
# On several machines, set ADDRESS on each of them to the name under which the others reach it.
# NPROC sets the number of processes of this node; default: one per GPU, or two on the CPU. Options are passed to the script.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../../workshop/runner.sh"         # sets $PYTHON

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/exercise4_elastic.py" --help ;; esac

# Find the number of processes, and check the options. A mistake in the options ends the runner here, with one line, before
# anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$here/exercise4_elastic.py" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# One to three nodes; if one leaves or joins, torchrun restarts the ranks of the others. last_call_timeout is the number of
# seconds for which the nodes wait for further ones. Without the variable, ranks look for an earlier rank 0 and hang.
rendezvous=(--nnodes=1:3 --rdzv-id=elastic --rdzv-backend=c10d --rdzv-endpoint="${ENDPOINT:-127.0.0.1:29400}")
rendezvous+=(--rdzv-conf=last_call_timeout=5 --max-restarts=100)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# "python -m torch.distributed.run" is torchrun, and it certainly uses $PYTHON.
exec "$PYTHON" -P -m torch.distributed.run "${rendezvous[@]}" --local-addr="${ADDRESS:-127.0.0.1}" --nproc-per-node="$nproc" \
    "$here/exercise4_elastic.py" "$@"
