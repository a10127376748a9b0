#!/usr/bin/env bash
# Train on 4 GPUs, 2 on each of two nodes:  sbatch exercise3_requeue.sh --epochs 5
# Check it:  ./workshop.sh check slurm-multinode/exercise3_requeue.sh
# As delivered, this is the solution of exercise 1. After the TODOs, the job survives a dead node and its time limit.
#SBATCH --job-name=exercise3_requeue
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=4            # for all processes of a node together
#SBATCH --ntasks-per-node=1          # one torchrun per node, which starts one process per GPU
#SBATCH --time=00:10:00
# TODO 2, step a: at the time limit, Slurm kills the job. Request a signal to this script one minute before the limit, so that
#         the script has time to react. Step b is below.
#         Look up: man sbatch: --signal, and the meaning of B: there
#SBATCH --output=%x-%j.log           # name and number of the job
# TODO 1, step a: allow Slurm to requeue the job when one of its nodes has died. The second start must append to the log,
#         because the log of the first start says why that start ended. Step b is below.
#         Look up: man sbatch: --requeue, --open-mode

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # the common name of its checkpoint, its epoch log and its error files
rm -rf "$run.logs" # remove the errors of an earlier start

# The processes meet on the first node of this job, at a port that no other job on that node uses.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
while (: <"/dev/tcp/$head/$port") 2>/dev/null; do port=$((port + 1)); done # port in use: try the next one
srun getent hosts "$head" >/dev/null || { echo "a node of this job does not know $head by name" >&2 && exit 1; }
rendezvous=(--nnodes="$SLURM_NNODES" --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port")
echo "rendezvous at $head:$port"

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit --cpus-per-task, and would give each task one core

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $SLURM_GPUS_ON_NODE GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # print the network settings; often there are none

# If a rank fails, show the error of the rank that failed first at the top of the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# TODO 2, step b: when the signal arrives, put this job back into the queue. The next start resumes from the checkpoint of the
#         last epoch.
#         Look up: help trap; man scontrol: requeue

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# TODO 1, step b: when a node dies, the torchrun on the other node fails. With --kill-on-bad-exit, srun then ends before Slurm
#         knows that the node is dead, and Slurm does not requeue a job that has failed. Let srun wait until then.
#         Look up: man srun: --kill-on-bad-exit
# srun starts torchrun on each node. With --kill-on-bad-exit, srun ends all tasks when one of them fails.
srun --kill-on-bad-exit=1 ${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" \
    --nproc-per-node="$SLURM_GPUS_ON_NODE" --log-dir="$run.logs" \
    multigpu_torchrun.py --checkpoint "$run.pt" "$@"
# TODO 3: bash runs a trap only when the command that it waits for has ended, here srun. At the time limit that is too late.
#         Start srun in the background, and wait for it with a builtin that a signal interrupts. Wait for this one process, so
#         that the script ends with the exit status of srun.
#         Look up: help wait; man bash: SIGNALS, and the special parameter for the last background process
