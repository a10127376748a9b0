#!/usr/bin/env bash
# Fine-tune on 4 GPUs, 2 on each of two nodes:  sbatch launch_fsdp_2N4G.sh --model codellama
#SBATCH --job-name=launch_fsdp_2N4G
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=4            # for all processes of a node together
#SBATCH --ntasks-per-node=1          # one torchrun per node, which starts one process per GPU
#SBATCH --time=00:10:00
#SBATCH --signal=B:USR1@60           # one minute before the time limit; B: only to this script, not to srun
#SBATCH --output=%x-%j.log           # name and number of the job
#SBATCH --requeue                    # if a node dies, Slurm starts this job again
#SBATCH --open-mode=append           # and appends to the same log

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
run=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # the common name of its checkpoint folder and its error files
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

# If a rank fails, show the error of the rank that failed first at the top of the log. (In the solutions, first_failure.py is
# one folder further up.)
trap '${PYTHON:-python} "$(ls ../{,../}slurm-multinode/first_failure.py 2>/dev/null | head -n 1)" "$run.logs"' ERR

# The next start resumes from the last complete checkpoint. As delivered, exercise 2 saves none, so it starts from the
# beginning.
trap 'echo "the time is nearly over: back into the queue"; scontrol requeue "$SLURM_JOB_ID"' USR1

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# srun starts torchrun on each node. With --kill-on-bad-exit, srun would end before Slurm knows that a node is dead. The job
# would then count as failed, and Slurm would not requeue it. So this option is not used here.
srun ${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" \
    --nproc-per-node="$SLURM_GPUS_ON_NODE" --log-dir="$run.logs" \
    exercise2_sharded_checkpoint.py --folder "$run" "$@" &
wait $! # bash runs a trap only after the current command has ended; a signal interrupts only wait
