#!/usr/bin/env bash
# Train with DeepSpeed on 4 GPUs, 2 on each of two nodes:  qsub -v ARGUMENTS="--epochs 5" launch_deepspeed_2N4G_pbs.sh
#PBS -N launch_deepspeed_2N4G
# Two chunks of this size. mpiprocs is the number of processes, one per GPU. mpiexec starts them.
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
run=runs/$PBS_JOBNAME-$job # the common name of its checkpoint folder and its error files

# The node file lists each node mpiprocs times, and starts with the node that runs this script.
head=$(head -n 1 "$PBS_NODEFILE")
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
gpus=$(grep -cxF "$head" "$PBS_NODEFILE")

# The processes meet on the first node of this job, at a port that no other job on that node uses.
port=$((20000 + job % 10000))
rendezvous=(MASTER_ADDR="$head" MASTER_PORT="$port" WORLD_SIZE="$((nodes * gpus))" LOCAL_WORLD_SIZE="$gpus")
echo "rendezvous at $head:$port"

export OMP_NUM_THREADS=$((NCPUS > gpus ? NCPUS / gpus : 1)) # PBS sets it to ncpus, but several processes share these cores

echo "job $PBS_JOBID on $(sort -u "$PBS_NODEFILE" | xargs): $gpus GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # print the network settings; often there are none

# If a rank fails, show the error of the rank that failed first at the top or end of the log. (In solutions, first_failure.py is
# one folder further up.)
trap '${PYTHON:-python} "$(ls ../{,../}slurm-multinode/first_failure.py 2>/dev/null | head -n 1)" "$run.logs"' ERR

# One process per GPU of each node, not bound to single cores. Each implementation of mpiexec has different options for this.
case $(mpiexec --version 2>&1) in
    *Open*) placement=(--map-by "ppr:$gpus:node" --bind-to none) ;; # Open MPI
    *HYDRA* | *Intel*) placement=(-ppn "$gpus") ;;                  # MPICH, Intel MPI
    *) placement=(-ppn "$gpus" --cpu-bind none) ;;                  # PALS, on Cray machines
esac
# Some implementations of mpiexec do not pass variables to the other nodes, or start in a different folder there. env sets both.
settings='PATH|LD_LIBRARY_PATH|PYTHON\w*|OMP_NUM_THREADS|WORKSHOP_\w+|TORCH_\w+|(NCCL|RCCL|FI|GLOO)_\w+|\w+_OFFLINE'
mapfile -t variables < <(env | grep -E "^($settings)=")

# Each process reads its rank from a variable that mpiexec sets. Its name depends on the implementation: Open MPI, MPICH or
# PALS.
mkdir -p "$run.logs"
# shellcheck disable=SC2016 # the variables in '' are those of the process
mpiexec -n "$((nodes * gpus))" "${placement[@]}" env --chdir="$PWD" "${variables[@]}" "${rendezvous[@]}" bash -c '
    export RANK=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$PALS_RANKID}}
    export LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${PMI_LOCAL_RANK:-$PALS_LOCAL_RANKID}}}
    export TORCHELASTIC_ERROR_FILE=$1/error-$RANK.json
    exec ${PYTHON:-python} "${@:2}"' bash "$run.logs" \
    exercise1_deepspeed.py --folder "$run" "${arguments[@]}"
