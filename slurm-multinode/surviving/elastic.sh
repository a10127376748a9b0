#!/usr/bin/env bash
# Train on one to three nodes that may leave and join:  sbatch elastic.sh --epochs 20
# Let one more node join the job NUMBER:                sbatch --nodes=1 --export=ALL,JOIN=NUMBER elastic.sh --epochs 20
# Let a node leave without killing it:                  scancel NUMBER.STEP   (squeue --steps lists the steps)
#SBATCH --job-name=elastic
#SBATCH --nodes=2
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=2            # for all processes of a node together
#SBATCH --ntasks-per-node=1          # one torchrun per node, which starts one process per GPU
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log           # name and number of the job
#SBATCH --no-kill                    # if a node dies, the job continues on its other nodes
#SBATCH --requeue                    # for scontrol requeue: see below
#SBATCH --open-mode=append           # a second start appends to the same log

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
name=elastic-${JOIN:-$SLURM_JOB_ID}    # a node that joins has a different job, and the same name
run=runs/$name
# A mistake in the options ends the job here, with one line, before torchrun restarts anything because of it.
${PYTHON:-python} -m workshop.training.preflight elastic.py --checkpoint "$run.pt" "$@" >/dev/null

# The torchruns meet in a store. If a torchrun hosted it, the others could not outlive that torchrun. So this script hosts it,
# on the first node of the job. If that node dies, all torchruns end. Because of --no-kill, Slurm then does not end the job, which
# does nothing until its time limit. Start it again with scontrol requeue NUMBER: the training resumes from its checkpoint.
if [[ -z ${JOIN:-} ]]; then
    rm -f "$run.store" # of an earlier start
    ${PYTHON:-python} rendezvous_store.py "$run.store" &
    store=$!
    trap 'kill "$store" 2>/dev/null || true' EXIT
    while [[ ! -s $run.store ]]; do kill -0 "$store" && sleep 0.2; done
fi
[[ -s $run.store ]] || { echo "there is no $run.store: job $JOIN does not run, or does not use this folder" >&2 && exit 2; }
rendezvous=(--nnodes=1:3 --rdzv-id="$name" --rdzv-backend=c10d --rdzv-endpoint="$(<"$run.store")")
# is_host=0: no torchrun hosts a store. last_call_timeout: how many seconds the nodes wait for further ones before they start.
# Each node that leaves costs the others one of the restarts; a node that joins costs none.
rendezvous+=("--rdzv-conf=is_host=0,last_call_timeout=5" --max-restarts=20)
# Without this variable, ranks look for the store of an earlier rank 0, whose node may have left, and hang.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit --cpus-per-task, and would give each task one core
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: rendezvous $name at $(<"$run.store")"

# Each node has a step of its own, so that the end of one torchrun does not end the others.
tasks=()
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    # shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
    srun --nodes=1 --ntasks=1 --nodelist="$node" --no-kill ${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" \
        --nproc-per-node="$SLURM_GPUS_ON_NODE" elastic.py --checkpoint "$run.pt" "$@" &
    tasks+=($!)
done
status=1 # the training has succeeded if it has on one of the nodes
for task in "${tasks[@]}"; do
    if wait "$task"; then status=0; else echo "a node has left"; fi
done
exit $status
