#!/usr/bin/env bash
# Measure the nodes of this job. `workshop doctor --nodes` submits this script with the file of the result and the number of nodes.
#SBATCH --job-name=doctor-nodes
#SBATCH --nodes=2
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:10:00
#SBATCH --no-kill
#SBATCH --output=runs/doctor-nodes-%j.log

set -euo pipefail
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site; "workshop submit" and "workshop doctor" set the variable
result=$1 nodes=$2

# The programs on the nodes connect to the one on the first node, at a port that no other program uses.
mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n "$nodes")
port=$((20000 + SLURM_JOB_ID % 10000))
while (: <"/dev/tcp/${names[0]}/$port") 2>/dev/null; do port=$((port + 1)); done
[[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it

# --overlap: inside the job of a user, the step shares the processors with the steps that run already.
# --kill-on-bad-exit=0, --no-kill: if a node fails, the programs on the others go on, and report it.
# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
exec srun --overlap --kill-on-bad-exit=0 --no-kill --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
    ${PYTHON:-python} -P -m workshop.doctor.nodes.program "$result" "$port" "${names[@]}"
