#!/usr/bin/env bash
# Start a JAX program: one process on each GPU of this machine, or two on the CPU where there is none.
# Options go on to it; NPROC sets another number of processes:  NPROC=4 run_jax.sh train_digits.py --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"         # sets $PYTHON

script=$here/$(basename "${1:-none}")
[ -f "$script" ] || { echo "$(basename "$0"): which program? psum.py or train_digits.py" >&2 && exit 2; }
shift
case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$script" --help ;; esac

# How many processes? A mistake in the options ends here, in one line, before anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$script" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# torchrun starts any program, and ends all processes when one has died. At the free port that it tells them it would listen itself,
# for PyTorch's processes; so it leaves that port to JAX.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# "python -m torch.distributed.run" is torchrun, of this Python for certain. --local-addr: it would else ask for the address of
# this machine's name, and not every laptop or container can resolve its own.
exec "$PYTHON" -P -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$nproc" "$script" "$@"
