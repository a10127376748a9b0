#!/usr/bin/env bash
# Train on 4 GPUs, 2 on each of two nodes:  qsub -v ARGUMENTS="--epochs 5" pbs/requeue.sh
# It survives its time limit and a dead node: a next job carries on from the checkpoint of the last epoch.
#PBS -N requeue
# Two chunks of this size. mpiprocs is the number of GPUs again: ngpus appears in no variable, mpiprocs in the node file.
#PBS -l select=2:ncpus=4:mpiprocs=2:ngpus=2
# Each chunk on a node of its own: PBS may else put two small ones on one.
#PBS -l place=scatter
#PBS -l walltime=00:10:00
# When the node of this script has died, PBS starts this job again.
#PBS -r y
# One log for output and errors, written while the job runs: NAME.oNUMBER, in the folder that qsub is called in.
#PBS -j oe
#PBS -k oed

set -euo pipefail
cd "$PBS_O_WORKDIR" # where qsub was called; PBS starts a script in $HOME
source "${WORKSHOP_SITE:-/dev/null}" # modules, network and Python of this site: "workshop submit" names the file
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 # a node may have no internet: nobody waits for it
read -ra arguments <<<"${ARGUMENTS:-}" # PBS hands no arguments to a script: qsub -v does
job=${PBS_JOBID%%.*} # 17 of 17.server
run=${RUN:-runs/$PBS_JOBNAME-$job} # what its checkpoint, the log of its epochs and its errors are called, in the next job too
rm -rf "$run.logs" # the errors of the job before

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

# One process on each node, with all the cores there: each kind of mpiexec has other words for that.
case $(mpiexec --version 2>&1) in
    *Open*) placement=(--map-by ppr:1:node --bind-to none) ;; # Open MPI
    *HYDRA* | *Intel*) placement=(-ppn 1) ;;                  # MPICH, Intel MPI
    *) placement=(-ppn 1 --cpu-bind none) ;;                  # PALS, on Cray machines
esac
# Not every one hands variables over to the other nodes, or starts there in this folder: env does both.
settings='PATH|LD_LIBRARY_PATH|PYTHON\w*|OMP_NUM_THREADS|WORKSHOP_\w+|(NCCL|RCCL|FI|GLOO)_\w+|\w+_OFFLINE'
mapfile -t variables < <(env | grep -E "^($settings)=")

# PBS tells no script that its time is nearly over, so this one ends the training itself, a minute before.
this_job() { qstat -f -F dsv "$PBS_JOBID" | tr '|' '\n' | sed -n "s/^$1=//p"; }
IFS=: read -r hours minutes seconds <<<"$(this_job Resource_List.walltime)"
limit=$((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds - SECONDS - 60))
checkpoint_time() { stat --format=%y "$run.pt" 2>/dev/null || true; }
before=$(checkpoint_time)

# mpiexec starts torchrun on each node.
status=0
# shellcheck disable=SC2086 # $PYTHON may be several words: a container, and the Python in it
timeout --kill-after=20 "$limit" mpiexec -n "$nodes" "${placement[@]}" env --chdir="$PWD" "${variables[@]}" \
    ${PYTHON:-python} -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$gpus" --log-dir="$run.logs" \
    multigpu_torchrun.py --checkpoint "$run.pt" "${arguments[@]}" || status=$?
if ((status == 0)); then exit; fi
if ((status == 124)); then
    echo "the time is nearly over: stopped" # 124 is what timeout says
else
    # The error of the first rank that failed.
    # shellcheck disable=SC2086
    ${PYTHON:-python} first_failure.py "$run.logs"
fi

# Without a new checkpoint a next job would get no further than this one.
if [[ $(checkpoint_time) == "$before" ]]; then exit "$status"; fi

# qrerun is for the operators of PBS, so this submits itself again, with what qsub was told. It begins when this job has ended:
# two never write the same checkpoint.
next=$(qsub ${PBS_ACCOUNT:+-A "$PBS_ACCOUNT"} -q "$PBS_O_QUEUE" -W depend=afterany:"$PBS_JOBID" \
    -l select="$(this_job Resource_List.select)" -l place=scatter -l walltime="$hours:$minutes:$seconds" \
    -v "RUN=$run,WORKSHOP_SITE=${WORKSHOP_SITE:-},ARGUMENTS='${ARGUMENTS:-}'" "$0")
echo "job $next carries on from the new checkpoint"
exit "$status"
