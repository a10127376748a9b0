#!/usr/bin/env bash
# Train on the 4 GPUs of one node:  qsub -v ARGUMENTS="--epochs 5" pbs/launch_ddp_1N4G.sh
#PBS -N launch_ddp_1N4G
# One chunk of this size. mpiprocs repeats the number of GPUs, because the script can read mpiprocs from the node file, but no
# variable contains ngpus.
#PBS -l select=1:ncpus=8:mpiprocs=4:ngpus=4
#PBS -l walltime=00:10:00
# Write output and errors to one log while the job runs: NAME.oNUMBER, in the folder where you call qsub.
#PBS -j oe
#PBS -k oed

set -euo pipefail
cd "$PBS_O_WORKDIR" # where qsub was called; PBS starts a script in $HOME
source "${WORKSHOP_SITE:-/dev/null}" # settings of this site (modules, network, Python); "workshop submit" sets the variable
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # no downloads: a node may have no internet access
read -ra arguments <<<"${ARGUMENTS:-}" # PBS passes no arguments to a script, but qsub -v passes this variable
job=${PBS_JOBID%%.*} # 17 from 17.server
run=runs/$PBS_JOBNAME-$job # the common name of its checkpoint, its epoch log and its error files

# The node file lists each node mpiprocs times, and starts with the node that runs this script.
head=$(head -n 1 "$PBS_NODEFILE")
gpus=$(grep -cxF "$head" "$PBS_NODEFILE")

rendezvous=(--standalone)

export OMP_NUM_THREADS=$((NCPUS > gpus ? NCPUS / gpus : 1)) # PBS sets it to ncpus, but several processes share these cores

echo "job $PBS_JOBID on $head: $gpus GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # print the network settings; often there are none

# If a rank fails, show the error of the rank that failed first at the top or end of the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$gpus" --log-dir="$run.logs" \
    multigpu_torchrun.py --checkpoint "$run.pt" "${arguments[@]}"
