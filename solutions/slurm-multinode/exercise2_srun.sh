#!/usr/bin/env bash
# Train on 4 GPUs, 2 on each of two nodes:  sbatch exercise2_srun.sh --epochs 5
#SBATCH --job-name=exercise2_srun
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=2            # for each process
#SBATCH --ntasks-per-node=2          # one per GPU. A task sees both GPUs; with --gpus-per-task=1 only its own, with index 0
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log           # name and number of the job

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # the common name of its checkpoint, its epoch log and its error files

# The processes meet on the first node of this job, at a port that no other job on that node uses.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
while (: <"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done # in use: try the next
srun getent hosts "$MASTER_ADDR" >/dev/null || { echo "a node of this job does not know $MASTER_ADDR by name" >&2 && exit 1; }
WORLD_SIZE=$SLURM_NTASKS
LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
export MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE run
echo "rendezvous at $MASTER_ADDR:$MASTER_PORT"

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit --cpus-per-task, and would give each task one core

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_GPUS_ON_NODE GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # print the network settings; often there are none

# If a rank fails, show the error of the rank that failed first at the top of the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# Each task knows its number, which becomes its rank. With --kill-on-bad-exit, srun ends all tasks when one of them fails, so
# the others do not wait for it.
mkdir -p "$run.logs"
# shellcheck disable=SC2016 # the variables in '' are those of the task
srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID TORCHELASTIC_ERROR_FILE=$run.logs/error-$SLURM_PROCID.json
    exec ${PYTHON:-python} "$@"' bash \
    multigpu_torchrun.py --checkpoint "$run.pt" "$@"
