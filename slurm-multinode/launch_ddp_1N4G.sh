#!/usr/bin/env bash
# Train on the 4 GPUs of one node:  sbatch launch_ddp_1N4G.sh --epochs 5
#SBATCH --job-name=launch_ddp_1N4G
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8            # for all processes of a node together
#SBATCH --ntasks-per-node=1          # one torchrun per node, which starts one process per GPU
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log           # name and number of the job

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # the common name of its checkpoint, its epoch log and its error files

rendezvous=(--standalone)

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_GPUS_ON_NODE GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # print the network settings; often there are none

# If a rank fails, show the error of the rank that failed first at the top of the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$SLURM_GPUS_ON_NODE" --log-dir="$run.logs" \
    multigpu_torchrun.py --checkpoint "$run.pt" "$@"
