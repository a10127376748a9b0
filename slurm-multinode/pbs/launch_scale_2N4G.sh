#!/usr/bin/env bash
# Train ResNet-50 on 4 GPUs, 2 on each of two nodes:  qsub -v ARGUMENTS="--strategy fsdp" pbs/launch_scale_2N4G.sh
#PBS -N launch_scale_2N4G
# Two chunks of this size. mpiprocs repeats the number of GPUs, because the script can read mpiprocs from the node file, but no
# variable contains ngpus.
#PBS -l select=2:ncpus=4:mpiprocs=2:ngpus=2
# Each chunk gets its own node. Otherwise, PBS may put two small chunks on one node.
#PBS -l place=scatter
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
run=runs/$PBS_JOBNAME-$job # the common name of its figures and its error files

# The node file lists each node mpiprocs times, and starts with the node that runs this script.
head=$(head -n 1 "$PBS_NODEFILE")
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
gpus=$(grep -cxF "$head" "$PBS_NODEFILE")

# The processes meet on the first node of this job, at a port that no other job on that node uses.
port=$((20000 + job % 10000))
rendezvous=(--nnodes="$nodes" --rdzv-id="$PBS_JOBID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port")
echo "rendezvous at $head:$port"

export OMP_NUM_THREADS=$((NCPUS > gpus ? NCPUS / gpus : 1)) # PBS sets it to ncpus, but several processes share these cores

echo "job $PBS_JOBID on $(sort -u "$PBS_NODEFILE" | xargs): $gpus GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # print the network settings; often there are none

# If a rank fails, show the error of the rank that failed first at the top or end of the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# One process per node, with all cores of the node. Each implementation of mpiexec has different options for this.
case $(mpiexec --version 2>&1) in
    *Open*) placement=(--map-by ppr:1:node --bind-to none) ;; # Open MPI
    *HYDRA* | *Intel*) placement=(-ppn 1) ;;                  # MPICH, Intel MPI
    *) placement=(-ppn 1 --cpu-bind none) ;;                  # PALS, on Cray machines
esac
# Some implementations of mpiexec do not pass variables to the other nodes, or start in a different folder there. env sets both.
settings='PATH|LD_LIBRARY_PATH|PYTHON\w*|OMP_NUM_THREADS|WORKSHOP_\w+|(NCCL|RCCL|FI|GLOO)_\w+|\w+_OFFLINE'
mapfile -t variables < <(env | grep -E "^($settings)=")

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# mpiexec starts torchrun on each node.
mpiexec -n "$nodes" "${placement[@]}" env --chdir="$PWD" "${variables[@]}" \
    ${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$gpus" --log-dir="$run.logs" \
    train_at_scale.py --output "$run.json" "${arguments[@]}"
