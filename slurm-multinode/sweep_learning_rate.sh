#!/usr/bin/env bash
# Train with four learning rates, one GPU each, two at a time:  sbatch sweep_learning_rate.sh --epochs 5
#SBATCH --job-name=sweep_learning_rate
#SBATCH --array=0-3%2                # four jobs, 0 to 3; at most two run at the same time
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
#SBATCH --output=%x-%A-%a.log        # name and number of the array, index of the job in it

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
# The ID of the array is the same in all four jobs. The index in the array selects the learning rate.
run=runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID

learning_rates=(1e-5 1e-4 1e-3 1e-2)
learning_rate=${learning_rates[SLURM_ARRAY_TASK_ID]}

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))

echo "job $SLURM_ARRAY_TASK_ID of array $SLURM_ARRAY_JOB_ID on $SLURM_JOB_NODELIST: learning rate $learning_rate"

# If a rank fails, show the error of the rank that failed first at the top of the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
${PYTHON:-python} -m torch.distributed.run --standalone --nproc-per-node="$SLURM_GPUS_ON_NODE" --log-dir="$run.logs" \
    multigpu_torchrun.py --checkpoint "$run.pt" --learning-rate "$learning_rate" "$@"
