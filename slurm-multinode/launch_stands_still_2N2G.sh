#!/usr/bin/env bash
# Run a program of exercise 5 on two nodes, with one process on each:  sbatch launch_stands_still_2N2G.sh PROGRAM [OPTIONS]
#SBATCH --job-name=launch_stands_still_2N2G
#SBATCH --nodes=2
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --ntasks-per-node=1          # one torchrun per node
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log           # name and number of the job

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access

# The processes meet on the first node of this job, at a port that no other job on that node uses.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
while (: <"/dev/tcp/$head/$port") 2>/dev/null; do port=$((port + 1)); done # port in use: try the next one
rendezvous=(--nnodes="$SLURM_NNODES" --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port")

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit --cpus-per-task, and would give each task one core

# "workshop diagnose" starts torchrun, so that `./workshop.sh diagnose JOBID` can number the collectives of each rank.
# With this patience it reports nothing by itself.
# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
srun --kill-on-bad-exit=1 ${PYTHON:-python} -P -m workshop diagnose --patience=86400 -- \
    ${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$SLURM_GPUS_ON_NODE" "$@"
