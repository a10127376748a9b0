#!/usr/bin/env bash
# Train on a mesh of 4 GPUs, 2 on each of two nodes:  sbatch launch_all_2N4G.sh --pp 2 --tp 2
# The ranks of a node follow each other. So the last axis, tp, stays within a node, and pp communicates between the nodes.
#SBATCH --job-name=launch_all_2N4G
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=4            # for all processes of a node together
#SBATCH --ntasks-per-node=1          # one torchrun per node, which starts one process per GPU
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log           # name and number of the job

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # the common name of its checkpoint folder and its error files

# The processes meet on the first node of this job, at a port that no other job on that node uses.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
while (: <"/dev/tcp/$head/$port") 2>/dev/null; do port=$((port + 1)); done # port in use: try the next one
srun getent hosts "$head" >/dev/null || { echo "a node of this job does not know $head by name" >&2 && exit 1; }
rendezvous=(--nnodes="$SLURM_NNODES" --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port")
echo "rendezvous at $head:$port"

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit --cpus-per-task, and would give each task one core

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_GPUS_ON_NODE GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # print the network settings; often there are none

# If a rank fails, show the error of the rank that failed first at the top of the log. (In the solutions, first_failure.py is
# one folder further up.)
trap '${PYTHON:-python} "$(ls ../{,../}slurm-multinode/first_failure.py 2>/dev/null | head -n 1)" "$run.logs"' ERR

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# srun starts torchrun on each node. With --kill-on-bad-exit, srun ends all tasks when one of them fails.
srun --kill-on-bad-exit=1 ${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" \
    --nproc-per-node="$SLURM_GPUS_ON_NODE" --log-dir="$run.logs" \
    exercise8_all.py --folder "$run" "$@"
