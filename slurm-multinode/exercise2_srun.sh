#!/usr/bin/env bash
# Train on 4 GPUs, 2 on each of two nodes:  sbatch exercise2_srun.sh --epochs 5
# Check it:  ./workshop.sh check slurm-multinode/exercise2_srun.sh
# As delivered, this is the solution of exercise 1: torchrun starts the processes. After the TODOs, Slurm starts them.
#SBATCH --job-name=exercise2_srun
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
# TODO 2: after TODO 1, each training process is a task of its own. Request one task per GPU of a node, and 2 cores per task.
#         Each task then sees both GPUs of its node. (With --gpus-per-task=1 it would see only its own GPU, with index 0.)
#         Look up: man sbatch: --ntasks-per-node, --cpus-per-task
#SBATCH --cpus-per-task=4            # for all processes of a node together
#SBATCH --ntasks-per-node=1          # one torchrun per node, which starts one process per GPU
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log           # name and number of the job

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # the common name of its checkpoint, its epoch log and its error files

# The processes meet on the first node of this job, at a port that no other job on that node uses.
# TODO 1, step a: until now, torchrun has set variables for the processes. Set those that have the same value in all
#         processes, and export them, because srun passes exported variables to the tasks:
#         MASTER_ADDR and MASTER_PORT (the host and the port below), WORLD_SIZE (the number of tasks of the job) and
#         LOCAL_WORLD_SIZE (the number of tasks per node). The options for torchrun are no longer needed.
#         Look up: man sbatch: OUTPUT ENVIRONMENT VARIABLES: SLURM_NTASKS, SLURM_NTASKS_PER_NODE
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
while (: <"/dev/tcp/$head/$port") 2>/dev/null; do port=$((port + 1)); done # port in use: try the next one
srun getent hosts "$head" >/dev/null || { echo "a node of this job does not know $head by name" >&2 && exit 1; }
rendezvous=(--nnodes="$SLURM_NNODES" --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port")
echo "rendezvous at $head:$port"

# TODO 3: after TODO 2, a task is one process, and SLURM_CPUS_PER_TASK counts the cores of this process. Let it use all of them.
#         Look up: man sbatch: SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit --cpus-per-task, and would give each task one core

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_GPUS_ON_NODE GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # print the network settings; often there are none

# If a rank fails, show the error of the rank that failed first at the top of the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# TODO 1, step b: let srun start the program itself, without torchrun, and give each process its own RANK and LOCAL_RANK.
#         These values differ between the tasks, so this script cannot set them. A shell inside each task must set them, and
#         then become the program: srun bash -c '...' bash PROGRAM OPTIONS
#         Look up: man srun: OUTPUT ENVIRONMENT VARIABLES: SLURM_PROCID, SLURM_LOCALID; help exec
# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# srun starts torchrun on each node. With --kill-on-bad-exit, srun ends all tasks when one of them fails.
srun --kill-on-bad-exit=1 ${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" \
    --nproc-per-node="$SLURM_GPUS_ON_NODE" --log-dir="$run.logs" \
    multigpu_torchrun.py --checkpoint "$run.pt" "$@"
