#!/usr/bin/env bash
# Train with Lightning on 4 GPUs, 2 on each of two nodes:  sbatch launch_lightning_2N4G.sh --epochs 5
#SBATCH --job-name=launch_lightning_2N4G
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --ntasks-per-node=2          # a task for each GPU; Lightning wants this option, not --ntasks
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
#SBATCH --signal=USR1@60             # a minute before that is over; to the tasks: Lightning waits for it
#SBATCH --output=%x-%j.log           # name and number of the job
#SBATCH --requeue                    # when a node has died, start this job again
#SBATCH --open-mode=append           # and write on in the same log

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # modules, network and Python of this site: "workshop submit" names the file
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # a node may have no internet: nobody waits for it
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # what its checkpoint, the log of its epochs and its table of metrics are called

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it from above, and would give each task one core

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_NTASKS_PER_NODE tasks on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # what steers the network: often nothing does

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# srun starts all processes. Lightning reads Slurm's variables for their ranks, their number and where they meet.
srun ${PYTHON:-python} exercise2_lightning_cifar10.py --nodes "$SLURM_NNODES" --devices "$SLURM_NTASKS_PER_NODE" \
    --checkpoint "$run.ckpt" "$@"
