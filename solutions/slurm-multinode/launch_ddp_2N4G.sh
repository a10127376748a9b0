#!/usr/bin/env bash
# Train on 4 GPUs, 2 on each of two nodes:  sbatch launch_ddp_2N4G.sh --epochs 5
#SBATCH --job-name=launch_ddp_2N4G
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=4            # for all processes of a node together
#SBATCH --ntasks-per-node=1          # one torchrun on a node; it starts a process for each GPU there
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log           # name and number of the job

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # modules, network and Python of this site: "workshop submit" names the file
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # a node may have no internet: nobody waits for it
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # what its checkpoint, the log of its epochs and its errors are called

# The processes meet on the first node of this job, at a port that no other job there has.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
while (: <"/dev/tcp/$head/$port") 2>/dev/null; do port=$((port + 1)); done # somebody listens there: take the next
srun getent hosts "$head" >/dev/null || { echo "a node of this job does not know $head by name" >&2 && exit 1; }
rendezvous=(--nnodes="$SLURM_NNODES" --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port")
echo "rendezvous at $head:$port"

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it from above, and would give each task one core

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_GPUS_ON_NODE GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # what steers the network: often nothing does

# Should a rank fail: the error of the first one that did comes last in the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# srun starts torchrun on each node. --kill-on-bad-exit: when one gives up, the others do not wait for it.
srun --kill-on-bad-exit=1 ${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" \
    --nproc-per-node="$SLURM_GPUS_ON_NODE" --log-dir="$run.logs" \
    multigpu_torchrun.py --checkpoint "$run.pt" "$@"
