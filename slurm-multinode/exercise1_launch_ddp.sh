#!/usr/bin/env bash
# Train on 4 GPUs, 2 on each of two nodes:  sbatch exercise1_launch_ddp.sh --epochs 5
# Check it:  ./workshop.sh check slurm-multinode/exercise1_launch_ddp.sh
# As delivered, this is launch_ddp_1N4G.sh, which trains on one node. After all four TODOs it trains on several nodes.
#SBATCH --job-name=exercise1_launch_ddp
# TODO 1: a job gets only what it requests. Request two nodes with 2 GPUs each, and 2 cores per GPU. A task is one torchrun
#         with all processes of its node, so --cpus-per-task counts the cores of all these processes together.
#         Look up: man sbatch: --nodes, --gpus-per-node, --cpus-per-task
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

# TODO 3: with --standalone, each torchrun forms a group of its own. All of them must meet in one place: on the first node of
#         the job, at a port that no other job uses. The script must also work with a different number of nodes or GPUs, as in
#         sbatch --nodes=4 --gpus-per-node=1 exercise1_launch_ddp.sh. So take every name and every number from Slurm.
#         Look up: torchrun --help: --nnodes, --rdzv-id, --rdzv-backend, --rdzv-endpoint; scontrol show hostnames;
#         SLURM_NNODES, SLURM_JOB_ID, SLURM_JOB_NODELIST
rendezvous=(--standalone)

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))
# TODO 4: srun does not take --cpus-per-task from the #SBATCH lines, and gives each task only one core. Pass the number of cores
#         to srun, so that each torchrun gets all cores that the job has on its node.
#         Look up: man srun: --cpus-per-task, and the variable for this option under INPUT ENVIRONMENT VARIABLES

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_GPUS_ON_NODE GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # print the network settings; often there are none

# If a rank fails, show the error of the rank that failed first at the top of the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# TODO 2: this command runs only on the first node. Let srun start torchrun on each node of the job. When one torchrun fails,
#         srun must end the others, so that they do not wait for it.
#         Look up: man srun: --kill-on-bad-exit
${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$SLURM_GPUS_ON_NODE" --log-dir="$run.logs" \
    multigpu_torchrun.py --checkpoint "$run.pt" "$@"
