#!/usr/bin/env bash
# Train on the 4 GPUs of one node:  sbatch launch_ddp_1N4G.sh --epochs 5
#SBATCH --job-name=launch_ddp_1N4G
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8            # for all processes of a node together
#SBATCH --ntasks-per-node=1          # one torchrun on a node; it starts a process for each GPU there
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log           # name and number of the job

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # modules, network and Python of this site: "workshop submit" names the file
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # a node may have no internet: nobody waits for it
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # what its checkpoint, the log of its epochs and its errors are called

rendezvous=(--standalone)

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_GPUS_ON_NODE GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # what steers the network: often nothing does

# Should a rank fail: the error of the first one that did comes last in the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$SLURM_GPUS_ON_NODE" --log-dir="$run.logs" \
    multigpu_torchrun.py --checkpoint "$run.pt" "$@"
