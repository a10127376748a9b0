#!/usr/bin/env bash
# Train with DeepSpeed: one process per GPU of this machine, or two processes on the CPU if it has no GPU. Under srun or mpirun
# with one task per GPU, this script is one of the processes. Otherwise, torchrun starts them.
# Example:  exercise1_run_deepspeed.sh --epochs 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

# Which launcher started this script? Translate its variables into those that PyTorch reads. The processes meet at MASTER_ADDR:
# with Slurm, the first node.
place=()
if [ "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 ]; then
    place=(RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_STEP_NUM_TASKS"
        LOCAL_WORLD_SIZE="${SLURM_STEP_TASKS_PER_NODE%%[(,]*}" # 2(x3) means 2 on each of 3 nodes: take the first 2
        MASTER_ADDR="$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)" MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)))
elif [ "${OMPI_COMM_WORLD_SIZE:-1}" -gt 1 ]; then
    place=(RANK="$OMPI_COMM_WORLD_RANK" LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"
        LOCAL_WORLD_SIZE="$OMPI_COMM_WORLD_LOCAL_SIZE" MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}" MASTER_PORT="${MASTER_PORT:-29500}")
fi
source "$here/../../workshop/runner.sh"      # sets $PYTHON

case " $* " in *" --help "* | *" -h "*) exec "$PYTHON" "$here/exercise1_deepspeed.py" --help ;; esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ ${#place[@]} -gt 0 ]; then exec env "${place[@]}" "$PYTHON" "$here/exercise1_deepspeed.py" "$@"; fi

# Find the number of processes, and check the options. A mistake in the options ends the runner here, with one line, before
# anything is launched.
nproc=$("$PYTHON" -P -m workshop.training.preflight "$here/exercise1_deepspeed.py" "$@")

# "python -m torch.distributed.run" is torchrun, and it certainly uses $PYTHON. Without --local-addr, torchrun looks up the
# address of this machine's host name, which fails on some laptops and in some containers.
exec "$PYTHON" -P -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$nproc" \
    "$here/exercise1_deepspeed.py" "$@"
