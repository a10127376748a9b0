#!/usr/bin/env bash
# Train with Lightning on 4 GPUs, 2 on each of two nodes:  sbatch launch_lightning_2N4G.sh --epochs 5
#SBATCH --job-name=launch_lightning_2N4G
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --ntasks-per-node=2          # one task per GPU; Lightning requires this option, not --ntasks
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
#SBATCH --signal=USR1@60             # one minute before the time limit; Lightning then requeues the job
#SBATCH --output=%x-%j.log           # name and number of the job
#SBATCH --requeue                    # if a node dies, Slurm starts this job again
#SBATCH --open-mode=append           # and appends to the same log

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # the common name of its checkpoint, its epoch log and its table of metrics

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit --cpus-per-task, and would give each task one core

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_NTASKS_PER_NODE tasks on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # print the network settings; often there are none

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# srun starts all processes. Lightning reads the ranks, the number of processes and the address of the first node from the
# variables that Slurm sets.
srun ${PYTHON:-python} exercise2_lightning_cifar10.py --nodes "$SLURM_NNODES" --devices "$SLURM_NTASKS_PER_NODE" \
    --checkpoint "$run.ckpt" "$@"
