#!/usr/bin/env bash
# Be one node of a training. Start this on each node, with the same ENDPOINT: the host and port at which the nodes meet, by
# default 127.0.0.1:29400. On one machine, a terminal can be a node:  NPROC=1 exercise4_run_elastic.sh --epochs 20
# On several machines, set ADDRESS on each of them to the name under which the others reach it.
# NPROC sets the number of processes of this node; default: one per GPU, or two on the CPU. Options are passed to the script.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"         # sets $PYTHON

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/exercise4_elastic.py" --help ;; esac

# Find the number of processes, and check the options. A mistake in the options ends the runner here, with one line, before
# anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$here/exercise4_elastic.py" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# TODO 1: with --standalone, this torchrun is a training of its own. Let it meet the torchruns of the other nodes at $ENDPOINT,
#         and train with any number of nodes from one to three. When a node leaves, the ranks of the others fail, so torchrun must
#         restart them. Each meeting needs a store of its own: in a shared one, ranks look for an earlier rank 0 and hang.
#         Look up: torchrun --help: --nnodes, --max-restarts, --rdzv-id, --rdzv-backend, --rdzv-endpoint, --rdzv-conf;
#         TORCH_DISABLE_SHARE_RDZV_TCP_STORE in 02_pytorch_ddp/exercise3_run_global_metrics.sh
rendezvous=(--standalone)

# "python -m torch.distributed.run" is torchrun, and it certainly uses $PYTHON.
exec "$PYTHON" -P -m torch.distributed.run "${rendezvous[@]}" --local-addr="${ADDRESS:-127.0.0.1}" --nproc-per-node="$nproc" \
    "$here/exercise4_elastic.py" "$@"
