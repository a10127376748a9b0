#!/usr/bin/env bash
# Train on replicas that may die, on three nodes:  sbatch tolerate.sh --steps 2000
# Let one more node join the job NUMBER:           sbatch --nodes=1 --export=ALL,JOIN=NUMBER tolerate.sh
#SBATCH --job-name=tolerate
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1          # one launcher per node, which starts the replicas of the node
#SBATCH --cpus-per-task=2            # for all replicas of a node together
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log           # name and number of the job
#SBATCH --no-kill                    # if a node dies, the job continues on its other nodes

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
run=runs/tolerate-${JOIN:-$SLURM_JOB_ID} # a node that joins has a different job, and the same name
export OMP_NUM_THREADS=1
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit --cpus-per-task, and would give each task one core
mkdir -p runs
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"

# Each node has a step of its own, so that the end of one does not end the others.
launch() {
    # shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
    srun --nodes=1 --ntasks=1 --nodelist="$1" --no-kill ${PYTHON:-python} tolerate.py --replicas 1 "${@:2}"
}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [[ -z ${JOIN:-} ]]; then
    # The lighthouse is on the first node. If this node dies, the training ends.
    rm -f "$run.address" # of an earlier start
    launch "${nodes[0]}" --address "$run.address" --log "$run.jsonl" "$@" &
    lighthouse=$!
    while [[ ! -s $run.address ]]; do kill -0 "$lighthouse" && sleep 0.2; done
    nodes=("${nodes[@]:1}")
fi
[[ -s $run.address ]] || { echo "there is no $run.address: job $JOIN does not run, or does not use this folder" >&2 && exit 2; }
others=()
for node in "${nodes[@]}"; do
    launch "$node" --lighthouse "$(<"$run.address")" "$@" &
    others+=($!)
done
if [[ -n ${JOIN:-} ]]; then
    wait "${others[0]}"
else
    wait "$lighthouse" # the training has ended, and the other launchers end too
    rm -f "$run.address"
fi
