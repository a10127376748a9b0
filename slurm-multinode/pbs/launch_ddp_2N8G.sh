#!/usr/bin/env bash
# Train on 8 GPUs, 4 on each of two nodes:  qsub -v ARGUMENTS="--epochs 5" pbs/launch_ddp_2N8G.sh
#PBS -N launch_ddp_2N8G
# Two chunks of this size. mpiprocs is the number of GPUs again: ngpus appears in no variable, mpiprocs in the node file.
#PBS -l select=2:ncpus=8:mpiprocs=4:ngpus=4
# Each chunk on a node of its own: PBS may else put two small ones on one.
#PBS -l place=scatter
#PBS -l walltime=00:10:00
# One log for output and errors, written while the job runs: NAME.oNUMBER, in the folder that qsub is called in.
#PBS -j oe
#PBS -k oed

set -euo pipefail
cd "$PBS_O_WORKDIR" # where qsub was called; PBS starts a script in $HOME
source "${WORKSHOP_SITE:-/dev/null}" # modules, network and Python of this site: "workshop submit" names the file
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # a node may have no internet: nobody waits for it
read -ra arguments <<<"${ARGUMENTS:-}" # PBS hands no arguments to a script: qsub -v does
job=${PBS_JOBID%%.*} # 17 of 17.server
run=runs/$PBS_JOBNAME-$job # what its checkpoint, the log of its epochs and its errors are called

# The node file names each node once for each of its mpiprocs, and first the node that this script runs on.
head=$(head -n 1 "$PBS_NODEFILE")
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
gpus=$(grep -cxF "$head" "$PBS_NODEFILE")

# The processes meet on the first node of this job, at a port that no other job there has.
port=$((20000 + job % 10000))
rendezvous=(--nnodes="$nodes" --rdzv-id="$PBS_JOBID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port")
echo "rendezvous at $head:$port"

export OMP_NUM_THREADS=$((NCPUS > gpus ? NCPUS / gpus : 1)) # PBS sets it to ncpus, for each process

echo "job $PBS_JOBID on $(sort -u "$PBS_NODEFILE" | xargs): $gpus GPUs on a node, $OMP_NUM_THREADS cores for each"
env | grep -E '^(NCCL|RCCL|FI|GLOO)_' || true # what steers the network: often nothing does

# Should a rank fail: the error of the first one that did comes last in the log.
trap '${PYTHON:-python} first_failure.py "$run.logs"' ERR

# One process on each node, with all the cores there: each kind of mpiexec has other words for that.
case $(mpiexec --version 2>&1) in
    *Open*) placement=(--map-by ppr:1:node --bind-to none) ;; # Open MPI
    *HYDRA* | *Intel*) placement=(-ppn 1) ;;                  # MPICH, Intel MPI
    *) placement=(-ppn 1 --cpu-bind none) ;;                  # PALS, on Cray machines
esac
# Not every one hands variables over to the other nodes, or starts there in this folder: env does both.
settings='PATH|LD_LIBRARY_PATH|PYTHON\w*|OMP_NUM_THREADS|WORKSHOP_\w+|(NCCL|RCCL|FI|GLOO)_\w+|\w+_OFFLINE'
mapfile -t variables < <(env | grep -E "^($settings)=")

# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
# mpiexec starts torchrun on each node.
mpiexec -n "$nodes" "${placement[@]}" env --chdir="$PWD" "${variables[@]}" \
    ${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$gpus" --log-dir="$run.logs" \
    multigpu_torchrun.py --checkpoint "$run.pt" "${arguments[@]}"
