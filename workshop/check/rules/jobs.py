"""Job scripts: what they ask Slurm for, what they start, and whether they survive a dead node and their time limit."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from workshop.check.evidence.job import PROGRAM, Job, Request, Start
from workshop.check.rules.ending import crash, no_training
from workshop.check.rules.processes import device_index, no_group, port_fixed, wrong_group
from workshop.check.rules.restart import epoch_repeated, never_resumes, resume_fails
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import DIRECTIVES, JOB, JOB_ELSEWHERE, NODE_DIES, REAL_JOB, REQUEST, TIME_OVER

if TYPE_CHECKING:
    from workshop.slurm.shape import Shape

# ---------------------------------------------------------------- what the script asks for


@rule(
    why="Slurm reads #SBATCH lines only above the first command, and takes every other line with # for a comment.",
    fix="Write #SBATCH without a space after the #, and move all of these lines above the first command.",
    runs=DIRECTIVES,
    blocks=True,
    anywhere=True,
)
def directive_ignored(ignored: list[tuple[str, str]]) -> Said:
    """A line looks like a directive, and Slurm ignores it."""
    for where, reason in ignored:
        yield Seen(reason, where)


@rule(
    why="Slurm never starts a job that it rejects.",
    fix="Correct the #SBATCH line that Slurm names; the manual page of sbatch lists all options.",
    runs=REQUEST,
    blocks=True,
    anywhere=True,
)
def job_refused(request: Request) -> Said:
    """Slurm rejects the script's directives."""
    if request.refused:
        yield Seen(f"Slurm rejects the script: {request.refused}")


@job_refused.also(JOB)
@job_refused.also(JOB_ELSEWHERE)
@job_refused.also(NODE_DIES)
@job_refused.also(TIME_OVER)
@job_refused.also(REAL_JOB)
def job_refused_with_options(job: Job) -> Said:
    """Slurm rejects the script when options for a different shape or other nodes are added."""
    if job.refused:
        yield Seen(f"Slurm rejects the script: {job.refused}")


@rule(
    why="A job gets only the nodes, GPUs and cores that it asks for.",
    fix="Correct the #SBATCH lines with --nodes, --gpus-per-node, --ntasks-per-node and --cpus-per-task.",
    runs=REQUEST,
    after=(job_refused,),
    blocks=True,
)
def job_shape(request: Request) -> Said:
    """The script asks for a different shape: judged at once only where no job can run."""
    return _other_request(request) if request.alone else ()


@job_shape.also((REQUEST, JOB), after=(job_refused,))
def job_shape_with_its_job(request: Request, _: Job) -> Said:
    """The same, judged together with what the job shows: that may be a mistake in an earlier goal."""
    return _other_request(request)


def _other_request(request: Request) -> Said:
    if request.asked and request.wanted and request.asked != request.wanted:
        yield Seen(f"the script asks for {request.asked}; this exercise needs {request.wanted}")


# ---------------------------------------------------------------- what a job has started

Check = Callable[[Job], Seen | None]


def _shape(job: Job) -> "Shape":
    """The shape that a job was run in."""
    if job.shape is None:
        raise ValueError(f"the shape of job {job.number} is not known")
    return job.shape


def _hosts(job: Job) -> set[str]:
    return {start.host for start in job.starts}


def _torchruns(job: Job) -> list[str]:
    """The nodes on which a torchrun waited when the job stalled."""
    return [node for node, count in (job.launchers or {}).items() if count]


def _by_torchrun(job: Job) -> bool:
    return bool(_torchruns(job)) or any("TORCHELASTIC_RUN_ID" in start.environment for start in job.starts)


def _completed(job: Job) -> bool:
    """Whether it trained all epochs, each once, and ended well."""
    return job.epochs == list(range(job.epochs_asked)) and job.state == "COMPLETED"


def _some_nodes(job: Job) -> Seen | None:
    """Only some of its nodes do anything."""
    busy: Iterable[str] = _hosts(job) or _torchruns(job)
    if not busy or len(set(busy)) >= _shape(job).nodes:
        return None
    idle = [node for node in job.nodes if node not in busy]
    rest = f"; {', '.join(idle)} {'is' if len(idle) == 1 else 'are'} allocated but idle" if idle else ""
    where = ", ".join(sorted(busy))
    if job.starts:
        return Seen(f"all {len(job.starts)} processes run on {where}{rest}")
    return Seen(f"torchrun runs only on {where}, and waits for the other nodes{rest}")


def _groups_apart(job: Job) -> Seen | None:
    """The torchruns of its nodes did not find each other, or its processes are in several groups."""
    if not job.starts:
        waiting = ", ".join(_torchruns(job))
        text = f"torchrun runs on {waiting}, but the torchruns do not find each other"
        return Seen(text, detail=job.output[-3000:]) if waiting else None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    groups = {tuple(start.environment.get(name) for name in names) for start in job.starts}
    if len(groups) == 1:
        return None
    each = len(job.starts) // len(groups)
    return Seen(
        f"{len(job.starts)} processes are in {len(groups)} groups of {each}: each group trains a model of its own, "
        "and all write to the same snapshot"
    )


def _nothing_started(job: Job) -> Seen | None:
    """The training program was never started."""
    if job.starts:
        return None
    text = f"the job ends as {job.state} before it has started {PROGRAM}: {job.last_error}"
    return Seen(text, detail=job.output[-3000:])


def _numbers_missing(job: Job) -> Seen | None:
    """Processes do not know their rank or the number of processes."""
    lost = [names for start in job.starts if (names := [name for name in NUMBERS if name not in start.environment])]
    return Seen(f"{len(lost)} of {len(job.starts)} processes have no {' and no '.join(lost[0])}") if lost else None


NUMBERS = ("RANK", "WORLD_SIZE")


def _numbers_wrong(job: Job) -> Seen | None:
    """The ranks do not count the processes, or there is not one process for each GPU."""
    count, shape = len(job.starts), _shape(job)
    worlds = {start.environment["WORLD_SIZE"] for start in job.starts}
    ranks = sorted((start.environment["RANK"] for start in job.starts), key=lambda rank: (len(rank), rank))
    if worlds != {str(count)} or ranks != [str(rank) for rank in range(count)]:
        text = f"{count} processes have the ranks {', '.join(ranks)} and WORLD_SIZE {', '.join(sorted(worlds))}"
        return Seen(text, detail=job.output[-3000:])
    if count != shape.all_gpus:
        return Seen(f"there are {count} processes for {plural(shape.all_gpus, 'GPU')}")
    return None


def _several_torchruns(job: Job) -> Seen | None:
    """Several torchruns on a node each start processes, and the job fails."""
    tasks = next((int(found[1]) for start in job.starts if (found := re.search(r"Tasks=(\d+)", start.step))), 0)
    nodes = len(_hosts(job))
    if not _by_torchrun(job) or tasks <= nodes or _completed(job):
        return None
    text = f"srun starts {tasks} torchruns on {nodes} nodes, but one torchrun per node starts all processes of its node"
    return Seen(f"{text}: {job.last_error}", detail=job.output[-3000:])


def _no_meeting(job: Job) -> Seen | None:
    """Its processes have the right numbers, and do not connect."""
    text = f"the processes start but do not find each other: {job.last_error}"
    return None if job.epochs else Seen(text, detail=job.output[-3000:])


def _unfinished(job: Job) -> Seen | None:
    """It trains, and does not come to its end."""
    text = f"the job ends as {job.state}: {job.last_error}"
    return None if _completed(job) else Seen(text, detail=job.output[-3000:])


# In this order: where one sees something, those below it have nothing to judge.
STARTED: tuple[Check, ...] = (_some_nodes, _groups_apart, _nothing_started, _numbers_missing, _numbers_wrong)
LAUNCHED: tuple[Check, ...] = (*STARTED, _several_torchruns, _no_meeting, _unfinished)


def _first(job: Job, checks: Sequence[Check] = LAUNCHED) -> tuple[Check, Seen] | None:
    """The first check that sees something."""
    return next(((check, seen) for check in checks if (seen := check(job))), None)


def _said(job: Job, *mine: Check) -> Said:
    """What the first check that sees something has seen, if it is one of ``mine``."""
    found = _first(job)
    if found and found[0] in mine:
        yield found[1]


@rule(
    why="Slurm starts one process for each GPU already; a torchrun in each task starts further processes.",
    fix="Let srun start the program itself. Export MASTER_ADDR, MASTER_PORT and WORLD_SIZE before srun, and in each task "
    "RANK from SLURM_PROCID and LOCAL_RANK from SLURM_LOCALID.",
    runs=JOB,
    after=(job_refused,),
    blocks=True,
)
def still_torchrun(job: Job) -> Said:
    """torchrun starts the processes, where Slurm is to do it."""
    if _by_torchrun(job):
        yield Seen("torchrun starts the processes; in this exercise Slurm starts them, one task for each")


AFTER = (job_refused, still_torchrun)


@rule(
    why="Slurm runs the commands of a script only on the first node; you pay for the other nodes, but they do nothing.",
    fix="Start the processes with srun, which runs a command once for each task, on all nodes of the job.",
    runs=JOB,
    after=AFTER,
    blocks=True,
    anywhere=True,
)
def one_node_only(job: Job) -> Said:
    """Only some of the nodes do anything."""
    return _said(job, _some_nodes)


@rule(
    why="Processes that do not meet in one group each train a model of their own, or wait until they time out.",
    fix="Give all nodes the same meeting place: the first node of the job and a port computed from SLURM_JOB_ID. For torchrun "
    "these are --rdzv-backend=c10d, --rdzv-id and --rdzv-endpoint; without torchrun, MASTER_ADDR and MASTER_PORT.",
    runs=JOB,
    after=AFTER,
    blocks=True,
    anywhere=True,
)
def separate_groups(job: Job) -> Said:
    """The processes do not form one group."""
    return _said(job, _groups_apart, _no_meeting)


@no_training.also(JOB, after=AFTER)
def no_training_in_a_job(job: Job) -> Said:
    """The training program was never started."""
    return _said(job, _nothing_started)


@no_group.also(JOB, after=AFTER)
def no_group_in_a_job(job: Job) -> Said:
    """Processes do not know their rank."""
    return _said(job, _numbers_missing)


@wrong_group.also(JOB, after=AFTER)
def wrong_group_in_a_job(job: Job) -> Said:
    """The number of processes is wrong, or their ranks are."""
    return _said(job, _numbers_wrong, _several_torchruns)


@device_index.also(JOB, after=AFTER)
def device_index_in_a_job(job: Job) -> Said:
    """The processes of a node do not have the local ranks from 0 on."""
    if not _first(job, STARTED) and (seen := _local_ranks(job)):
        yield seen


@rule(
    why="The GPU waits for batches that one core has to prepare, while other cores of the job are idle.",
    fix="Export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun, because srun ignores the script's --cpus-per-task, and "
    "set OMP_NUM_THREADS to the number of cores per process.",
    runs=JOB,
    after=AFTER,
    anywhere=True,
)
def cores_lost(job: Job) -> Said:
    """A task has fewer cores than the job has for it, or its processes do not compute with them."""
    if not _first(job, STARTED) and (seen := _cores(job)):
        yield seen


@crash.also(JOB, after=AFTER)
def crash_in_a_job(job: Job) -> Said:
    """The job trains, and does not come to its end."""
    return _said(job, _unfinished)


def _local_ranks(job: Job) -> Seen | None:
    for host in sorted(_hosts(job)):
        here = [start.environment for start in job.starts if start.host == host]
        ranks = sorted(each.get("LOCAL_RANK", "none") for each in here)
        if ranks != [str(number) for number in range(len(here))]:
            return Seen(f"the processes on {host} have the local ranks {', '.join(ranks)}")
        sizes = {each.get("LOCAL_WORLD_SIZE", "none") for each in here}
        if sizes != {str(len(here))}:
            return Seen(f"{len(here)} processes on {host} have LOCAL_WORLD_SIZE {', '.join(sorted(sizes))}")
    return None


def _cores(job: Job) -> Seen | None:
    shape = _shape(job)
    given = next((_cores_per_task(start) for start in job.starts if start.step), shape.cores)
    if given < shape.cores:
        return Seen(f"srun gives each task {given} of the {shape.cores} cores that the job has for it")
    each = shape.cores / (len(job.starts) // len(_hosts(job)) / shape.tasks)
    threads = {start.environment.get("OMP_NUM_THREADS", "none") for start in job.starts}
    if threads != {f"{each:g}"}:
        return Seen(f"each process has {each:g} cores, but OMP_NUM_THREADS is {', '.join(sorted(threads))}")
    return None


def _cores_per_task(start: Start) -> int:
    """The cores of a task, from what Slurm says of its step."""
    if each := re.search(r"TresPerTask=\S*cpu:(\d+)", start.step):
        return int(each[1])
    cores = re.search(r"TresPerStep=\S*cpu:(\d+)", start.step) or re.search(r"\bCPUs=(\d+)", start.step)
    tasks = re.search(r"Tasks=(\d+)", start.step)
    return int(cores[1]) // int(tasks[1]) if cores and tasks else 0


# ---------------------------------------------------------------- the same script on other nodes, in another shape


@rule(
    why="The next job may run on different nodes, and its processes then look for each other on a node that is not among them.",
    fix='Take the host from Slurm: the first line of scontrol show hostnames "$SLURM_JOB_NODELIST".',
    runs=JOB_ELSEWHERE,
    after=(job_refused,),
)
def meeting_place(job: Job) -> Said:
    """The processes meet on a node that is not one of the job's."""
    place = _place(job)
    if place and place[0].partition(".")[0] not in job.nodes:
        yield Seen(f"on {job.nodes[0]} to {job.nodes[-1]} the processes still look for {place[0]}")


@rule(
    why="A number that is written into the script is wrong as soon as somebody asks for a different number of nodes or GPUs.",
    fix="Take the numbers from Slurm: SLURM_NNODES, SLURM_NTASKS, SLURM_GPUS_ON_NODE, SLURM_CPUS_PER_TASK.",
    runs=JOB_ELSEWHERE,
    after=(job_refused, meeting_place, device_index, cores_lost),
)
def shape_fixed(job: Job) -> Said:
    """In another shape the script starts something else than one process for each GPU, as one group."""
    found = _first(job, (*LAUNCHED, _local_ranks, _cores))
    if found:
        shape = _shape(job)
        what = f"with sbatch --nodes={shape.nodes} --gpus-per-node={shape.gpus}"
        yield Seen(f"{what}: {found[1].text}", detail=found[1].detail)


@port_fixed.also((JOB, JOB_ELSEWHERE), after=(job_refused, meeting_place, shape_fixed))
def port_fixed_in_jobs(job: Job, other: Job) -> Said:
    """Two jobs meet at the same port."""
    places = _place(job), _place(other)
    if places[0] and places[1] and places[0][1] == places[1][1]:
        yield Seen(f"two jobs use the port {places[0][1]}")


def _place(job: Job) -> tuple[str, str] | None:
    """The host and the port at which the processes of a job look for each other."""
    for words in [*(start.launcher for start in job.starts), *job.commands]:
        for at, word in enumerate(words):
            if word.replace("_", "-").startswith("--rdzv-endpoint"):
                host, _, port = (word.partition("=")[2] or words[at + 1]).rpartition(":")
                return host, port
    for start in job.starts:
        if "MASTER_ADDR" in start.environment:
            return start.environment["MASTER_ADDR"], start.environment.get("MASTER_PORT", "")
    return None


# ---------------------------------------------------------------- a dead node, and the end of the time


@rule(
    why="When a node dies, the run is over until a person submits it again.",
    fix="Add #SBATCH --requeue, and start srun without --kill-on-bad-exit, which ends the job before Slurm finds the dead node.",
    runs=NODE_DIES,
    after=(job_refused,),
    blocks=True,
)
def not_requeued(job: Job) -> Said:
    """Slurm does not start the job again after one of its nodes has died."""
    if job.fault and not job.restarts:
        text = f"{job.fault} died in epoch {len(job.epochs) + 1}, and the job is over ({job.state}): Slurm does not restart it"
        yield Seen(text, detail=job.output[-3000:])


@rule(
    why="Slurm kills a job at its time limit: the work since the last checkpoint is lost, and the run does not continue.",
    fix="Ask for a signal with #SBATCH --signal=B:USR1@60, and before srun set a trap for USR1 that calls "
    'scontrol requeue "$SLURM_JOB_ID".',
    runs=TIME_OVER,
    after=(job_refused,),
    blocks=True,
)
def no_warning(job: Job) -> Said:
    """The script is not told that its time is nearly over, or does not act on it."""
    signal = job.options.get("signal", "")
    if not signal:
        yield Seen("the job does not ask for a signal before its time is over, and is killed at the limit")
    elif not asks_for_its_script(signal):
        yield Seen(f"--signal={signal} signals only the processes that srun has started, not the script (B:)")
    elif job.fault and not job.restarts and job.state != "RUNNING":
        yield Seen(f"{job.fault} was sent and ended the job ({job.state}): nothing puts it back into the queue")


def asks_for_its_script(signal: str) -> bool:
    """Whether a value of --signal, such as B:USR1@60, has the signal sent to the script itself."""
    return "B" in signal.partition("@")[0].rpartition(":")[0]


@rule(
    why="bash runs a trap only when the command that it waits for has ended; at the time limit that is too late.",
    fix="Start srun in the background with &, and wait for it with `wait $!`, which a signal interrupts.",
    runs=TIME_OVER,
    after=(job_refused, no_warning),
)
def trap_late(job: Job) -> Said:
    """The shell does not act on the signal while srun runs."""
    if job.fault and not job.restarts and job.state == "RUNNING":
        yield Seen(f"{job.fault} was sent, and 8 s later nothing has happened: the shell still waits for srun")


@crash.also(NODE_DIES, after=(job_refused,))
@crash.also(TIME_OVER, after=(job_refused, no_warning))
def crash_in_the_first_epochs(job: Job) -> Said:
    """The job does not train long enough for the check to disturb it."""
    if not job.fault:
        text = f"the job ends as {job.state}, in its first epochs: {job.last_error}"
        yield Seen(text, detail=job.output[-3000:])


@resume_fails.also(NODE_DIES)
@resume_fails.also(TIME_OVER)
def resume_fails_in_a_job(job: Job) -> Said:
    """The second start trains nothing."""
    if job.restarts and len(job.epochs) <= job.before:
        yield Seen(f"the second start trains nothing: {job.last_error}", detail=job.output[-3000:])


@never_resumes.also(NODE_DIES)
@never_resumes.also(TIME_OVER)
def never_resumes_in_a_job(job: Job) -> Said:
    """The second start begins with the first epoch."""
    if job.restarts and job.epochs[job.before :][:1] == [0]:
        yield Seen(f"after {job.before} epochs the second start begins with epoch 1 again")


@epoch_repeated.also(NODE_DIES, after=(never_resumes,))
@epoch_repeated.also(TIME_OVER, after=(never_resumes,))
def epoch_repeated_in_a_job(job: Job) -> Said:
    """The second start trains an epoch again, or leaves one out."""
    if job.restarts and len(job.epochs) > job.before and job.epochs != list(range(len(job.epochs))):
        yield Seen(f"the epochs are {[epoch + 1 for epoch in job.epochs]}")


@rule(
    why="The output of the first start is lost, and with it the reason why that start ended.",
    fix="Add #SBATCH --open-mode=append.",
    runs=NODE_DIES,
    after=(job_refused, resume_fails, never_resumes, epoch_repeated),
)
def log_overwritten(job: Job) -> Said:
    """The second start writes over the log of the first."""
    if job.restarts and job.options.get("open-mode") != "a":
        yield Seen("the second start writes over the log of the first")


# ---------------------------------------------------------------- with the real training


@crash.also(REAL_JOB, after=(job_refused,), active=True)
def crash_with_the_real_training(job: Job) -> Said:
    """With the real training program the job fails."""
    if job.state != "COMPLETED" or not job.processes:
        text = f"with the real training the job ends as {job.state}: {job.last_error}"
        yield Seen(text, detail=job.output[-3000:])


@wrong_group.also(REAL_JOB)
def wrong_group_with_the_real_training(job: Job) -> Said:
    """The real training has more or fewer processes than GPUs."""
    gpus = _shape(job).all_gpus
    if job.state == "COMPLETED" and job.processes not in (0, gpus):
        yield Seen(f"the real training has {plural(job.processes, 'process')} for {plural(gpus, 'GPU')}")
