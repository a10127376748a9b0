#!/usr/bin/env bash
# Train on 4 GPUs, 2 on each of two nodes:  sbatch exercise1_launch_ddp.sh --epochs 5
# Have it checked:  ./workshop.sh check slurm-multinode/exercise1_launch_ddp.sh
#SBATCH --job-name=exercise1_launch_ddp
# TODO 1: ask for 2 GPUs on each of two nodes, and for 2 cores a GPU
#         (man sbatch: --nodes, --gpus-per-node, --cpus-per-task)
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8            # for all processes of a node together
#SBATCH --ntasks-per-node=1          # one torchrun on a node; it starts a process for each GPU there
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log           # name and number of the job

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # modules, network and Python of this site: "workshop submit" names the file
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # a node may have no internet: nobody waits for it
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # what its snapshot, the log of its epochs and its errors are called

# TODO 3: let the processes of all nodes meet in one place: on the first node of the job, at a port that no other job uses.
#         The script shall also run as sbatch --nodes=4 --gpus-per-node=1 exercise1_launch_ddp.sh: take from Slurm what it knows
#         (torchrun --help: --nnodes, --rdzv-id, --rdzv-backend, --rdzv-endpoint; scontrol show hostnames)
rendezvous=(--standalone)

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))
# TODO 4: let each torchrun have all the cores that the job has on its node, not only one
#         (man srun: --cpus-per-task, and the variables that srun reads)

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_GPUS_ON_NODE GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # what steers the network: often nothing does

# Should a rank fail: the error of the first one that did comes last in the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# TODO 2: start torchrun on each node of the job, and let none wait when another has given up
#         (man srun: --kill-on-bad-exit)
${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$SLURM_GPUS_ON_NODE" --log-dir="$run.logs" \
    multigpu_torchrun.py --snapshot "$run.pt" "$@"
