"""Job scripts: what they request and start, and whether their jobs survive a failed node and the time limit."""

import re
from collections.abc import Callable
from itertools import chain, islice

from workshop.check.evidence.job import PROGRAM, Job, Request
from workshop.check.rules.ending import crash, no_training
from workshop.check.rules.processes import device_index, no_group, port_fixed, wrong_group
from workshop.check.rules.restart import epoch_repeated, never_resumes, resume_fails
from workshop.check.rules.rule import Makes, Said, Seen, Told, also, if_first, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import DIRECTIVES, JOB, JOB_ELSEWHERE, JOB_FAILS, NODE_DIES, REAL_JOB, REQUEST, TIME_OVER


@rule(
    why="Slurm reads #SBATCH lines only above the first command, and treats any other line with # as a comment.",
    fix="Write #SBATCH without a space after the #, and move all of these lines above the first command.",
    runs=DIRECTIVES,
    blocks=True,
    anywhere=True,
)
def directive_ignored(ignored: list[tuple[str, str]]) -> Said:
    """A line looks like a directive, and Slurm ignores it."""
    return [Seen(reason, where) for where, reason in ignored]


@rule(
    why="Slurm never starts a job that it rejects.",
    fix="Correct the #SBATCH line that Slurm names; the manual page of sbatch lists all options.",
    runs=REQUEST,
    blocks=True,
    anywhere=True,
)
def job_refused(script: Request | Job) -> Said:
    """Slurm rejects the directives, or the options that the check adds for a different shape or other nodes."""
    if script.refused:
        option = re.search(r"--[\w-]+", script.refused)
        yield Seen(
            f"Slurm rejects the script: {script.refused}", origin=f"text:^#SBATCH.*{option[0]}" if option else ""
        )


for _scenario in (JOB, JOB_ELSEWHERE, JOB_FAILS, NODE_DIES, TIME_OVER, REAL_JOB):
    job_refused.also(_scenario)(job_refused.detectors[0].function)


@rule(
    why="A job gets only the nodes, GPUs and cores that it asks for.",
    fix="Correct the #SBATCH lines with --nodes, --gpus-per-node, --ntasks-per-node and --cpus-per-task.",
    runs=REQUEST,
    after=(job_refused,),
    blocks=True,
    origin="text:^#SBATCH.*--nodes",
)
def job_shape(request: Request, job: Job | None = None) -> Said:
    """The script asks for a different shape. If jobs can run here, the job may show the mistake in an earlier goal first."""
    if (request.alone or job) and request.asked and request.wanted and request.asked != request.wanted:
        yield Seen(f"the script asks for {request.asked}; this exercise needs {request.wanted}")


job_shape.also((REQUEST, JOB), after=(job_refused,))(job_shape.detectors[0].function)


def _hosts(job: Job) -> set[str]:
    return {start.host for start in job.starts}


def _by_torchrun(job: Job) -> bool:
    torchruns = sum((job.launchers or {}).values())
    return torchruns > 0 or any("TORCHELASTIC_RUN_ID" in start.environment for start in job.starts)


def _failed(job: Job, text: str) -> Seen:
    return Seen(f"{text}: {job.last_error}", detail=job.output[-3000:])


@rule(
    why="Slurm already starts one process per GPU, and a torchrun in each task starts more.",
    fix="Let srun start the program itself. Export MASTER_ADDR, MASTER_PORT and WORLD_SIZE before srun, and in each task "
    "RANK from SLURM_PROCID and LOCAL_RANK from SLURM_LOCALID.",
    runs=JOB,
    after=(job_refused,),
    blocks=True,
    origin="text:^[^#]*(torchrun|torch.distributed.run)",
)
def still_torchrun(job: Job) -> Said:
    """torchrun starts the processes, but in this exercise Slurm should start them."""
    if _by_torchrun(job):
        yield Seen("torchrun starts the processes, but in this exercise Slurm must start them, one task per process")


AFTER = (job_refused, still_torchrun)


def _of_start(why: str, fix: str, blocks: bool = True, origin: str = "") -> "Makes[[Job]]":
    return rule(why=why, fix=fix, runs=JOB, after=AFTER, blocks=blocks, anywhere=True, origin=origin)


@_of_start(
    why="Slurm runs the commands of a script only on the first node; you pay for the other nodes, but they do nothing.",
    fix="Start the processes with srun, which runs a command once per task, on all nodes of the job.",
    origin=r"text:^[^#]*\b(srun|torchrun|torch\.distributed\.run)\b(?!.*getent)",
)
def one_node_only(job: Job) -> Said:
    """The processes run only on some of the nodes."""
    return if_first(one_node_only, _launch(job))


@_of_start(
    why="Processes that do not join one group train separate models, or wait until they time out.",
    fix="Use one address on all nodes: the first node of the job, and a port computed from SLURM_JOB_ID. Pass it to torchrun as "
    "--rdzv-endpoint, with --rdzv-backend=c10d and --rdzv-id; without torchrun, export MASTER_ADDR and MASTER_PORT.",
    origin="text:--rdzv-endpoint",
)
def separate_groups(job: Job) -> Said:
    """The processes do not form one group."""
    return if_first(separate_groups, _training(job))


@_of_start(
    why="The GPU waits for batches that one core has to prepare, while other cores of the job are idle.",
    fix="Export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun, because srun ignores the script's --cpus-per-task, and "
    "set OMP_NUM_THREADS to the number of cores per process.",
    blocks=False,
    origin="text:OMP_NUM_THREADS=|SRUN_CPUS_PER_TASK=",
)
def cores_lost(job: Job) -> Said:
    """The processes do not use all cores that the job has for them."""
    return if_first(cores_lost, _cores(job))


def _launch(job: Job) -> Told:
    """Whether the processes were started, on all nodes, in one group, and with the right numbers."""
    count, shape = len(job.starts), job.known_shape
    waiting = [node for node, torchruns in (job.launchers or {}).items() if torchruns]
    busy = _hosts(job) or set(waiting)
    if busy and len(busy) < shape.nodes:
        idle = [node for node in job.nodes if node not in busy]
        rest = f"; {', '.join(idle)} {'is' if len(idle) == 1 else 'are'} allocated but idle" if idle else ""
        where = ", ".join(sorted(busy))
        alone = f"torchrun runs only on {where}, and waits for the other nodes"
        yield one_node_only, Seen((f"all {count} processes run on {where}" if count else alone) + rest)
    if waiting and not count:
        text = f"torchrun runs on {', '.join(waiting)}, but these agents do not find each other"
        yield separate_groups, Seen(text, detail=job.output[-3000:])
    if not count:
        yield no_training, _failed(job, f"the job ends as {job.state} before it has started {PROGRAM}")
    environments = [start.environment for start in job.starts]
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    groups = {tuple(each.get(name) for name in names) for each in environments}
    if len(groups) > 1:
        text = f"{count} processes are in {len(groups)} groups of {count // len(groups)}, which train separate models"
        yield separate_groups, Seen(f"{text} and write to the same checkpoint")
    missing = [[name for name in ("RANK", "WORLD_SIZE") if name not in each] for each in environments]
    if lost := [names for names in missing if names]:
        yield no_group, Seen(f"{len(lost)} of {count} processes have no {' and no '.join(lost[0])}")
    worlds = {each["WORLD_SIZE"] for each in environments}
    ranks = sorted((each["RANK"] for each in environments), key=lambda rank: (len(rank), rank))
    if worlds != {str(count)} or ranks != [str(rank) for rank in range(count)]:
        text = f"{count} processes have the ranks {', '.join(ranks)} and WORLD_SIZE {', '.join(sorted(worlds))}"
        yield wrong_group, Seen(text, detail=job.output[-3000:])
    if count != shape.all_gpus:
        yield wrong_group, Seen(f"there are {count} processes for {plural(shape.all_gpus, 'GPU')}")


def _first(look: Callable[[Job], Told]) -> Callable[[Job], Told]:
    """Keep only the first thing seen, because it explains the rest."""
    return lambda job: islice(look(job), 1)


@also(no_training, no_group, wrong_group, crash, runs=JOB, after=AFTER)
@_first
def _training(job: Job) -> Told:
    """Whether the processes meet and train to the end."""
    yield from _launch(job)
    completed = job.epochs == list(range(job.epochs_asked)) and job.state == "COMPLETED"
    tasks = next((count for start in job.starts if (count := _number("Tasks=", start.step))), 0)
    nodes = len(_hosts(job))
    if _by_torchrun(job) and tasks > nodes and not completed:
        text = f"srun starts {tasks} torchruns on {nodes} nodes, but one torchrun per node starts all processes of its node"
        yield wrong_group, _failed(job, text)
    if not job.epochs:
        yield separate_groups, _failed(job, "the processes start but do not find each other")
    if not completed:
        yield crash, _failed(job, f"the job ends as {job.state}")


@also(device_index, runs=JOB, after=AFTER)
@_first
def _local_ranks(job: Job) -> Told:
    """Whether the local ranks on each node begin at 0 and are complete."""
    yield from _launch(job)
    for host in sorted(_hosts(job)):
        here = [start.environment for start in job.starts if start.host == host]
        ranks = sorted((each.get("LOCAL_RANK", "none") for each in here), key=lambda rank: (len(rank), rank))
        if ranks != [str(number) for number in range(len(here))]:
            yield device_index, Seen(f"the processes on {host} have the local ranks {', '.join(ranks)}")
        sizes = {each.get("LOCAL_WORLD_SIZE", "none") for each in here}
        if sizes != {str(len(here))}:
            text = f"{len(here)} processes on {host} have LOCAL_WORLD_SIZE {', '.join(sorted(sizes))}"
            yield device_index, Seen(text)


def _cores(job: Job) -> Told:
    """Whether each task gets its share of the cores, and its processes use them."""
    yield from _launch(job)
    shape = job.known_shape
    given = next((_cores_per_task(start.step) for start in job.starts if start.step), shape.cores)
    if given < shape.cores:
        yield cores_lost, Seen(f"srun gives each task only {given} of the {shape.cores} cores that the job has for it")
    each = shape.cores / (len(job.starts) // len(_hosts(job)) / shape.tasks)
    threads = {start.environment.get("OMP_NUM_THREADS", "none") for start in job.starts}
    if threads != {f"{each:g}"}:
        yield cores_lost, Seen(f"each process has {each:g} cores, but OMP_NUM_THREADS is {', '.join(sorted(threads))}")


def _cores_per_task(step: str) -> int:
    """The cores per task, from what Slurm says about the job step."""
    cores = _number(r"TresPerStep=\S*cpu:", step) or _number(r"\bCPUs=", step)
    return _number(r"TresPerTask=\S*cpu:", step) or cores // max(_number("Tasks=", step), 1)


def _number(name: str, step: str) -> int:
    found = re.search(rf"{name}(\d+)", step)
    return int(found[1]) if found else 0


@rule(
    why="The next job may run on different nodes, and its processes then try to connect to a node that is not in the job.",
    fix='Take the host from Slurm: the first line of scontrol show hostnames "$SLURM_JOB_NODELIST".',
    runs=JOB_ELSEWHERE,
    after=(job_refused,),
    origin="text:^[^#]*(MASTER_ADDR=|head)",
)
def meeting_place(job: Job) -> Said:
    """The processes connect to a node that is not in the job."""
    host, _ = _place(job)
    if host and host.partition(".")[0] not in job.nodes:
        yield Seen(f"in a job on {job.nodes[0]} to {job.nodes[-1]} the processes still connect to {host}")


@rule(
    why="A number in the script is wrong as soon as you request a different number of nodes or GPUs.",
    fix="Take the numbers from Slurm: SLURM_NNODES, SLURM_NTASKS, SLURM_GPUS_ON_NODE, SLURM_CPUS_PER_TASK.",
    runs=JOB_ELSEWHERE,
    after=(job_refused, meeting_place, device_index, cores_lost),
    origin=r"text:^[^#]*--(nnodes|nproc-per-node|ntasks)=\d text:^[^#]*\bsrun\b(?!.*getent)",
)
def shape_fixed(job: Job) -> Said:
    """With a different number of nodes or GPUs, the script does not start one group with one process per GPU."""
    shape = job.known_shape
    for _, seen in islice(chain(_training(job), _local_ranks(job), _cores(job)), 1):
        yield Seen(f"with sbatch --nodes={shape.nodes} --gpus-per-node={shape.gpus}: {seen.text}", detail=seen.detail)


@port_fixed.also((JOB, JOB_ELSEWHERE), after=(job_refused, meeting_place, shape_fixed))
def port_fixed_in_jobs(job: Job, other: Job) -> Said:
    """Two jobs use the same port."""
    (_, port), (_, other_port) = _place(job), _place(other)
    if port and port == other_port:
        yield Seen(f"two jobs use the port {port}")


def _place(job: Job) -> tuple[str, str]:
    """The host and the port at which the processes of a job find each other; "" if they are not given."""
    for words in (*(start.launcher for start in job.starts), *job.commands):
        if found := re.search(r"--rdzv[-_]endpoint[= ](\S*):(\S*)", " ".join(words)):
            return found[1], found[2]
    for start in job.starts:
        if "MASTER_ADDR" in start.environment:
            return start.environment["MASTER_ADDR"], start.environment.get("MASTER_PORT", "")
    return "", ""


@rule(
    why="When a node fails, the training stops until you submit the job again.",
    fix="Add #SBATCH --requeue, and start srun without --kill-on-bad-exit, which ends the job before Slurm finds the dead node.",
    runs=NODE_DIES,
    after=(job_refused,),
    blocks=True,
    origin="text:^#SBATCH.*requeue text:^#SBATCH",
)
def not_requeued(job: Job) -> Said:
    """Slurm does not restart the job after one of its nodes has failed."""
    if job.fault and not job.restarts:
        text = f"{job.fault} died in epoch {len(job.epochs) + 1}, and the job is over ({job.state}): Slurm does not restart it"
        yield Seen(text, detail=job.output[-3000:])


@rule(
    why="Slurm kills a job at its time limit: the work since the last checkpoint is lost, and the run does not continue.",
    fix='Add #SBATCH --signal=B:USR1@60, and before srun a trap for USR1 that calls scontrol requeue "$SLURM_JOB_ID".',
    runs=TIME_OVER,
    after=(job_refused,),
    blocks=True,
    origin="text:^#SBATCH.*--signal text:^#SBATCH",
)
def no_warning(job: Job) -> Said:
    """The script gets no signal before its time limit, or does not react to it."""
    signal = job.options.get("signal", "")
    if not signal:
        yield Seen("the job does not request a signal before its time limit, so Slurm kills it at the limit")
    elif not asks_for_its_script(signal):
        yield Seen(f"--signal={signal} sends the signal only to the processes of srun; with B: the script gets it")
    elif job.fault and not job.restarts and job.state != "RUNNING":
        yield Seen(f"{job.fault} was sent and ended the job ({job.state}), because the script does not requeue it")


def asks_for_its_script(signal: str) -> bool:
    """Whether a value of --signal, such as B:USR1@60, sends the signal to the script itself."""
    return "B" in signal.partition("@")[0].rpartition(":")[0]


@rule(
    why="bash runs a trap only after the foreground command has ended, which at the time limit is too late.",
    fix="Use `wait $!`, which a signal interrupts: start srun in the background with & and then wait for it.",
    runs=TIME_OVER,
    after=(job_refused, no_warning),
    origin=r"text:^[^#]*\bsrun\b(?!.*getent)",
)
def trap_late(job: Job) -> Said:
    """The shell does not react to the signal while srun runs."""
    if job.fault and not job.restarts and job.state == "RUNNING":
        yield Seen(f"{job.fault} was sent, and 8 s later nothing has happened: the shell still waits for srun")


@crash.also(NODE_DIES, after=(job_refused,))
@crash.also(TIME_OVER, after=(job_refused, no_warning))
def crash_in_the_first_epochs(job: Job) -> Said:
    """The job ends before the check can interrupt it."""
    if not job.fault:
        yield _failed(job, f"the job ends as {job.state}, in its first epochs")


@also(resume_fails, never_resumes, epoch_repeated, runs=NODE_DIES)
@also(resume_fails, never_resumes, epoch_repeated, runs=TIME_OVER)
def second_start(job: Job) -> Told:
    rest = job.epochs[job.before :]
    if job.restarts and not rest:
        yield resume_fails, _failed(job, "the second start trains nothing")
    elif job.restarts and rest[0] == 0:
        yield never_resumes, Seen(f"after {job.before} epochs the second start begins with epoch 1 again")
    elif job.restarts and job.epochs != list(range(len(job.epochs))):
        yield epoch_repeated, Seen(f"the epochs are {[epoch + 1 for epoch in job.epochs]}")


@rule(
    why="The output of the first start is lost, so you cannot see why that start ended.",
    fix="Add #SBATCH --open-mode=append.",
    runs=NODE_DIES,
    after=(job_refused, resume_fails, never_resumes, epoch_repeated),
    origin="text:^#SBATCH.*--open-mode text:^#SBATCH.*--output",
)
def log_overwritten(job: Job) -> Said:
    """The second start overwrites the log of the first."""
    if job.restarts and job.options.get("open-mode") != "a":
        yield Seen("the second start overwrites the log of the first")


@rule(
    why="Slurm starts the jobs that depend on this one, although it has failed, and you do not see the failure.",
    fix="End the script with the status of srun: `set -e`, and `wait $!` for srun in the background. Plain `wait` returns 0.",
    runs=JOB_FAILS,
    after=(job_refused,),
    origin=r"text:^[^#]*\bwait\b",
)
def failure_hidden(job: Job) -> Said:
    """One process failed, and Slurm counts the job as completed."""
    if job.state == "COMPLETED":
        yield Seen("the check let one process fail, and Slurm still counts the job as COMPLETED, with exit status 0")


@rule(
    why="When one process has failed, the others wait for it, often until the time limit; you pay for their nodes.",
    fix="Start srun with --kill-on-bad-exit=1: when one task fails, srun ends all others.",
    runs=JOB_FAILS,
    after=(job_refused,),
    origin=r"text:^[^#]*\bsrun\b(?!.*getent)",
)
def failure_waits(job: Job) -> Said:
    """After one process failed, the job went on until the others noticed it."""
    if job.lasted > 7:
        yield Seen(
            f"the check let one process fail; the others waited for it, and the job ended {job.lasted:.0f} s later"
        )


@rule(
    why="torchrun puts all agents with the same run id and endpoint into one group, so two jobs could disturb each other.",
    fix='Pass --rdzv-id="$SLURM_JOB_ID" to torchrun.',
    runs=(JOB, JOB_ELSEWHERE),
    after=(job_refused, meeting_place, shape_fixed),
    origin="text:--rdzv|rendezvous=",
)
def run_id_fixed(job: Job, other: Job) -> Said:
    """Two jobs have the same run id of torchrun."""
    ids = [
        {start.environment.get("TORCHELASTIC_RUN_ID") for start in each.starts if "c10d" in " ".join(start.launcher)}
        for each in (job, other)
    ]
    for name in sorted(map(str, ids[0] & ids[1])):
        yield Seen(f"two jobs have the run id {name}")


@also(crash, runs=REAL_JOB, after=(job_refused,), active=True)
@also(wrong_group, runs=REAL_JOB)
def real_training(job: Job) -> Told:
    gpus = job.known_shape.all_gpus
    if job.state != "COMPLETED" or not job.processes:
        yield crash, _failed(job, f"with the real training the job ends as {job.state}")
    elif job.processes != gpus:
        yield wrong_group, Seen(f"the real training has {plural(job.processes, 'process')} for {plural(gpus, 'GPU')}")
