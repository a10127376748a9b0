"""The rules about jobs: mistakes in job scripts that they must name, and correct styles that must pass."""

from check.bank.case import mistake, part, style
from check.bank.cases import bank_tests

STAGE = "solutions/slurm-multinode"
LAUNCH = f"{STAGE}/exercise1_launch_ddp.sh"
SRUN = f"{STAGE}/exercise2_srun.sh"
REQUEUE = f"{STAGE}/exercise3_requeue.sh"

# Parts of these scripts.
NODES = "#SBATCH --nodes=2\n"
STRICT = "set -euo pipefail\n"
HEAD = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
TORCHRUN = "srun --kill-on-bad-exit=1 ${PYTHON:-python} -m torch.distributed.run"

OTHER_LAUNCH = """\
#SBATCH -N 2
#SBATCH --gres=gpu:2
#SBATCH -c 4
#SBATCH -p gpu -t 5
export MASTER=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)
export PORT=$(( 10000 + SLURM_JOB_ID % 20000 ))
export GPUS=$(echo $CUDA_VISIBLE_DEVICES | tr , '\\n' | wc -l)
export OMP_NUM_THREADS=2
srun -K -c $SLURM_CPUS_PER_TASK bash -c 'torchrun --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID --nproc_per_node $GPUS \\
    --master-addr $MASTER --master-port $PORT multigpu_torchrun.py "$@"' run "$@"
exit
"""

MISTAKES = (
    # ---- what the script asks for
    mistake(
        "job-space-after-the-hash",
        LAUNCH,
        "directive-ignored",
        "Slurm takes '# SBATCH' for a comment.",
        ("#SBATCH --gpus-per-node", "# SBATCH --gpus-per-node"),
    ),
    mistake(
        "job-directive-below-the-first-command",
        LAUNCH,
        "directive-ignored",
        "Slurm reads directives only above the first command.",
        (NODES, ""),
        (STRICT, STRICT + NODES),
    ),
    mistake(
        "job-unknown-option",
        LAUNCH,
        "job-refused",
        "Slurm does not know the option.",
        ("--gpus-per-node", "--gpus-a-node"),
    ),
    mistake("job-of-one-node", LAUNCH, "job-shape", "The job asks for one node.", (NODES, "#SBATCH --nodes=1\n")),
    # ---- what it starts
    mistake(
        "job-without-srun",
        LAUNCH,
        "one-node-only",
        "Without srun torchrun starts only on the first node.",
        (TORCHRUN, TORCHRUN.partition("=1 ")[2]),
    ),
    mistake(
        "job-torchrun-on-each-task",
        SRUN,
        "still-torchrun",
        "Each of Slurm's tasks starts a torchrun instead of the program.",
        (
            'exec ${PYTHON:-python} "$@"',
            'exec ${PYTHON:-python} -m torch.distributed.run --nnodes="$SLURM_NTASKS" --node-rank="$RANK" '
            '--nproc-per-node=1 --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"',
        ),
    ),
    mistake(
        "job-first-node-of-today",
        LAUNCH,
        "meeting-place",
        "The endpoint is the first node of one job, written into the script.",
        (HEAD, "head=node1"),
    ),
    mistake(
        "job-localhost-as-endpoint",
        LAUNCH,
        "separate-groups",
        "The torchrun of each node looks for the others on its own node.",
        ('--rdzv-endpoint="$head:$port"', '--rdzv-endpoint="localhost:$port"'),
    ),
    mistake(
        "job-fixed-port",
        LAUNCH,
        "port-fixed",
        "All jobs meet at the same port.",
        ("port=$((20000 + SLURM_JOB_ID % 10000))", "port=29500"),
    ),
    mistake(
        "job-two-nodes-written-down",
        LAUNCH,
        "shape-fixed",
        "The number of nodes is written into the script.",
        ('--nnodes="$SLURM_NNODES"', "--nnodes=2"),
    ),
    mistake(
        "job-two-processes-written-down",
        LAUNCH,
        "shape-fixed",
        "The number of processes per node is written into the script.",
        ('--nproc-per-node="$SLURM_GPUS_ON_NODE"', "--nproc-per-node=2"),
    ),
    mistake(
        "job-all-cores-for-each-process",
        LAUNCH,
        "cores-lost",
        "Each process computes with the cores of all processes of the node.",
        ("$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))", "$SLURM_CPUS_PER_TASK"),
    ),
    mistake(
        "job-torchrun-for-each-gpu",
        LAUNCH,
        ("wrong-group", "one-node-only"),
        "Four torchruns start; the two that come first form the group.",
        (TORCHRUN, TORCHRUN.replace("=1 ", "=1 --ntasks-per-node=2 --ntasks=4 --cpus-per-task=2 ", 1)),
    ),
    mistake(
        "job-global-rank-as-local-rank",
        SRUN,
        "device-index",
        "LOCAL_RANK is the rank among all processes.",
        ("LOCAL_RANK=$SLURM_LOCALID", "LOCAL_RANK=$SLURM_PROCID"),
    ),
    mistake(
        "job-rank-of-the-batch-script",
        SRUN,
        "wrong-group",
        "All processes have the rank of the batch script.",
        ("RANK=$SLURM_PROCID", "RANK=0"),
    ),
    mistake(
        "job-no-world-size",
        SRUN,
        "no-group",
        "WORLD_SIZE is not set.",
        ("WORLD_SIZE=$SLURM_NTASKS\n", ""),
        ("MASTER_PORT WORLD_SIZE", "MASTER_PORT"),
    ),
    mistake(
        "job-without-run-id",
        LAUNCH,
        "run-id-fixed",
        "All jobs have the run id of torchrun's default, none.",
        ('--rdzv-id="$SLURM_JOB_ID" ', ""),
    ),
    # ---- a process that fails
    mistake(
        "job-waits-for-a-failed-process",
        LAUNCH,
        "failure-waits",
        "srun does not end the other tasks when one has failed.",
        (TORCHRUN, TORCHRUN.replace("--kill-on-bad-exit=1 ", "")),
    ),
    mistake(
        "job-plain-wait",
        REQUEUE,
        "failure-hidden",
        "wait without a process always succeeds, so a failed training ends as COMPLETED.",
        ("wait $! ", "wait "),
    ),
    # ---- a dead node, and the end of the time
    mistake(
        "job-not-requeued",
        REQUEUE,
        "not-requeued",
        "Slurm does not start the job again after a node has died.",
        ("#SBATCH --requeue ", "#SBATCH --no-requeue "),
    ),
    mistake(
        "job-signal-to-the-processes",
        REQUEUE,
        "no-warning",
        "The signal goes to the processes that srun has started, not to the script.",
        ("B:USR1@60", "USR1@60"),
    ),
    mistake(
        "job-waits-in-srun",
        REQUEUE,
        "trap-late",
        "The shell waits for srun, and runs the trap only when srun has ended.",
        ('"$run.pt" "$@" &\n', '"$run.pt" "$@"\n'),
        ("wait $! ", "true "),
    ),
    mistake(
        "job-checkpoint-of-another-name-at-each-start",
        REQUEUE,
        "never-resumes",
        "The name of the checkpoint changes with each start.",
        ('--checkpoint "$run.pt"', '--checkpoint "$run-${SLURM_RESTART_COUNT:-0}.pt"'),
    ),
    mistake(
        "job-log-overwritten",
        REQUEUE,
        "log-overwritten",
        "The second start writes over the log of the first.",
        ("#SBATCH --open-mode=append", "#"),
    ),
)

STYLES = (
    style(
        "job-static-rendezvous",
        LAUNCH,
        "Static rendezvous, --gres, short options, and the cores as an option of srun.",
        (part(LAUNCH, "#SBATCH --job-name", "\nset -euo"), OTHER_LAUNCH),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
