#!/usr/bin/env bash
# Start a JAX program: one process per GPU of this machine, or two processes on the CPU if it has no GPU.
# Options are passed to the program. NPROC sets a different number of processes.
# Example:  NPROC=4 run_jax.sh train_digits.py --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../workshop/runner.sh"         # sets $PYTHON

script=$here/$(basename "${1:-none}")
[ -f "$script" ] || { echo "$(basename "$0"): which program? psum.py or train_digits.py" >&2 && exit 2; }
shift
case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$script" --help ;; esac

# Find the number of processes, and check the options. A mistake in the options ends the runner here, with one line, before
# anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$script" "$@")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# torchrun starts any program, and ends all processes when one of them dies. By default, torchrun itself listens at the port
# that it passes to the processes, because PyTorch connects there. This variable keeps the port free for JAX.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# "python -m torch.distributed.run" is torchrun, and it certainly uses $PYTHON. Without --local-addr, torchrun looks up the
# address of this machine's host name, which fails on some laptops and in some containers.
exec "$PYTHON" -P -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$nproc" "$script" "$@"
