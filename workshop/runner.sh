# shellcheck shell=bash
# Sourced by the runners (exerciseK_run_*.sh): finds the workshop's Python, as $PYTHON.
# A notebook on a cluster runs inside a batch job. Libraries that look for Slurm, PBS or MPI would take the program that starts
# here for a task of that job, so remove the variables of the job.
for name in "${!SLURM_@}" "${!SBATCH_@}" "${!PBS_@}" "${!PALS_@}" "${!PMI_@}" "${!PMIX_@}" "${!OMPI_@}" "${!TORCHELASTIC_@}" \
    MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE; do
    unset "$name"
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${WORKSHOP_PYTHON:-}" ] && [ -r "$root/.workshop_origin" ]; then
    read -r WORKSHOP_PYTHON <"$root/.workshop_origin"     # a copy of a shared workshop, made by an Open OnDemand session
fi
if [ -z "${WORKSHOP_PYTHON:-}" ] && [ -e "$root/.venv/complete" ]; then
    PYTHON=$root/.venv/bin/python                         # the environment that ./workshop.sh made
    unset PYTHONPATH PYTHONHOME                           # (environment modules set these, which would break it)
else
    PYTHON=${WORKSHOP_PYTHON:-python3}                    # or the one that you named, or the one that is active
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}    # where "workshop" may not be installed
    if ! "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null; then
        echo "$(basename "$0"): $PYTHON has no torch; create the environment first with ./workshop.sh doctor" >&2
        exit 2
    fi
fi
export PYTHON

# Two processes cannot train on one GPU. If NPROC or an option asks for more processes than there are GPUs, hide the GPUs. (Under
# srun or mpirun, the job decides which GPUs a process sees; exercise1_run_deepspeed.sh then sets "place".)
asked=${NPROC:-1} before=
for word in "$@"; do
    case $before in --nproc | --devices) asked=$word ;; esac
    case $word in --nproc=* | --devices=*) asked=${word#*=} ;; esac
    before=$word
done
if [[ $asked =~ ^[1-9][0-9]{0,5}$ ]] && [ "$asked" -gt 1 ] && [ -z "${place[*]-}" ]; then
    hidden=$("$PYTHON" -P -c "
from workshop.run import environment, machine
print(environment.why_hidden($asked, machine.gpus_unopened()))")
    if [ -n "$hidden" ]; then
        echo "$hidden" >&2
        export CUDA_VISIBLE_DEVICES='' HIP_VISIBLE_DEVICES=''
    fi
fi
