"""What a job script does, judged: which trials to make, and what is found in them."""

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workshop.check.exercises import Exercise, find_exercise
from workshop.check.findings import Finding
from workshop.check.jobs import PROGRAM, Job, Refused, Shape, Trial
from workshop.check.judge import Verdict, ordered
from workshop.errors import UserError
from workshop.slurm import cluster as practice
from workshop.slurm.model import model
from workshop.slurm.script import ignored_directives, script_text
from workshop.training.logs import read_log

STAND_IN = Path(__file__).with_name("job_program.py")
NODES = 6  # for two jobs of two nodes, each with one to spare
EPOCHS = 3
# Enough that a job is still at work when Slurm finds a node dead.
LONG = 60
# The shape that each exercise ends with, and another one that its script has to be good for as well.
TORCHRUN, NATIVE = Shape(nodes=2, gpus=2, tasks=1, cores=4), Shape(nodes=2, gpus=2, tasks=2, cores=2)
OTHER = {TORCHRUN: Shape(nodes=4, gpus=1, tasks=1, cores=2), NATIVE: Shape(nodes=4, gpus=1, tasks=1, cores=2)}


def check_job(path: Path, quick: bool = False) -> Iterator[Verdict]:
    """Check a job script; yield the verdict when the quick goals are known, and again when all is done.

    Args:
        path: the script.
        quick: leave out the trial with the real training.

    Raises:
        UserError: it cannot be read.
    """
    script = readable_job(path)
    exercise = find_exercise(script)
    verdict = Verdict(script, exercise)
    start = time.monotonic()
    verdict.findings = [
        Finding("directive-ignored", what, f"{script.name}:{number}")
        for number, what in ignored_directives(script.read_text())
    ]
    with tempfile.TemporaryDirectory(prefix="workshop-check-") as place:
        try:
            name = f"check{Path(place).name.removeprefix('workshop-check-')}"
            cluster = practice.up(NODES, name=name, mine=True)
        except UserError as error:
            verdict.unchecked.append(f"what the script does: {error}")
            verdict.unjudged = set(exercise.goals) if exercise else set()
            _ask_a_controller(verdict, Path(place))
            verdict.seconds, verdict.complete = time.monotonic() - start, True
            yield verdict
            return
        try:
            bench = _Bench(script, Path(place), cluster)
            flow = _requeued if exercise and "not-requeued" in exercise.kinds else _launched
            try:
                found = flow(bench, exercise)
            except Refused as refusal:
                found = [Finding("job-refused", f"sbatch does not take it: {refusal}")]
            verdict.findings = ordered(verdict, [*verdict.findings, *found])
            verdict.seconds = time.monotonic() - start
            real = not quick and not verdict.errors and exercise is not None
            verdict.complete = not real
            yield verdict
            if real:
                verdict.findings = ordered(verdict, [*verdict.findings, *_really(bench)])
                verdict.seconds, verdict.complete = time.monotonic() - start, True
                yield verdict
        finally:
            cluster.end()


def readable_job(path: Path) -> Path:
    """The script's full path.

    Raises:
        UserError: it is missing, has the line ends of Windows, is no script, is for PBS, or bash cannot read it.
    """
    text = script_text(path)
    if not text.startswith("#!"):
        raise UserError(f"{path} has to begin with #! and the name of its shell, such as #!/usr/bin/env bash")
    if re.search(r"^#PBS", text, re.MULTILINE):
        raise UserError(f"{path} is for PBS; the check runs scripts for Slurm")
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"bash cannot read it: {done.stderr.strip().splitlines()[0]}")
    return path.resolve()


# The practice cluster's nodes, for a controller that has none.
PRACTICE = """\
NodeName=node[1-4] CPUs=8 RealMemory=512000 Gres=gpu:4
PartitionName=normal Nodes=ALL Default=YES MaxTime=1440 DefMemPerCPU=1000
"""


def _ask_a_controller(verdict: Verdict, place: Path) -> None:
    """Where no node can be started: what Slurm's controller alone makes of the script's directives, if there is one."""
    fragment = place / "practice.conf"
    fragment.write_text(PRACTICE)
    command = ["sbatch", "--partition=normal", str(verdict.file)]
    try:
        with model(fragment) as controller:
            taken, said = controller.test(command)
            request = controller.request(command) if taken else {}
    except UserError:
        return
    exercise = verdict.exercise
    found = [] if taken else [Finding("job-refused", f"sbatch does not take it: {said}")]
    if taken and exercise and "job-shape" in exercise.kinds:
        gpus = request.get("TresPerNode", "gpu:0").rpartition(":")[2]
        tasks = request["NtasksPerN:B:S:C"].partition(":")[0]
        numbers = (request["NumNodes"].partition("-")[0], gpus, tasks, request["CPUs/Task"])
        found += shape_findings(Shape(*(int(number) or 1 for number in numbers)), _wanted(exercise))
        verdict.unjudged.discard(exercise.goal("job-shape"))
    verdict.findings = ordered(verdict, [*verdict.findings, *found])


def _wanted(exercise: Exercise) -> Shape:
    """The shape that an exercise ends with."""
    return NATIVE if "still-torchrun" in exercise.kinds else TORCHRUN


def shape_findings(asked: Shape, wanted: Shape) -> list[Finding]:
    """Whether a job asks for what it should."""
    return [] if asked == wanted else [Finding("job-shape", f"it asks for {asked}; wanted are {wanted}")]


class _Bench:
    """Where trials of one script are made."""

    def __init__(self, script: Path, place: Path, cluster: practice.Cluster):
        self.script, self.place, self.cluster = script, place, cluster

    def trial(self, program: Path | None = STAND_IN) -> Trial:
        return Trial(self.script, self.place, self.cluster, program)

    def request(self) -> tuple[Shape, dict[str, str]]:
        """What the script asks for: its shape, and the options that it has.

        A job with the script's directives and nothing else in it tells what Slurm makes of them.
        """
        trial = self.trial()
        lines = self.script.read_text().splitlines()
        body = next((at for at, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
        command = "env > request.txt"
        (trial.folder / "request.sh").write_text("\n".join([*lines[:body], command, ""]))
        job = trial.submit([], [], "request.sh")
        trial.follow(job)
        answer = trial.folder / "request.txt"
        if not answer.exists():
            raise Refused(f"Slurm does not run a job with these directives: {job.state} {job.last_error}")
        said = dict(line.split("=", 1) for line in answer.read_text().splitlines() if line.startswith("SLURM_"))
        nodes = int(said["SLURM_NNODES"])
        tasks = int(said.get("SLURM_NTASKS", nodes)) // nodes
        shape = Shape(nodes, int(said.get("SLURM_GPUS_ON_NODE", 0)), tasks, int(said.get("SLURM_CPUS_PER_TASK", 1)))
        return shape, job.asked


def _launched(bench: _Bench, exercise: Exercise | None) -> list[Finding]:
    """The goals of a script that starts a training on several nodes."""
    asked, options = bench.request()
    gres = "gres" in options
    native = exercise is not None and "still-torchrun" in exercise.kinds
    wanted = asked if exercise is None else _wanted(exercise)
    found = shape_findings(asked, wanted)
    first = _run(bench, [] if asked == wanted else wanted.options(gres))
    found += launch_findings(first, wanted, native)
    if exercise is None or found:
        return found
    # The same script on other nodes, of another shape: what is written into it instead of taken from Slurm shows.
    second = _run(bench, [*OTHER[wanted].options(gres), "--exclude=node1"])
    found += other_shape(first, second, OTHER[wanted])
    return found


def _run(bench: _Bench, options: list[str], epochs: int = EPOCHS) -> Job:
    """Run the script to its end."""
    trial = bench.trial()
    job = trial.submit(options, ["--epochs", str(epochs)])
    trial.follow(job)
    return job


def launch_findings(job: Job, shape: Shape, native: bool) -> list[Finding]:
    """What a job shows that should have started one process for each GPU of its nodes, as one group."""
    starts = job.starts
    by_torchrun = any("TORCHELASTIC_RUN_ID" in start["environment"] for start in starts) or any(
        (job.launchers or {}).values()
    )
    if native and by_torchrun:
        return [
            Finding("still-torchrun", "torchrun starts the processes; here Slurm is to start them, one task for each")
        ]
    hosts = {start["host"] for start in starts}
    waiting = [node for node, count in (job.launchers or {}).items() if count]
    if not starts:
        if job.launchers is not None and waiting and len(waiting) < shape.nodes:
            return [
                Finding(
                    "one-node-only",
                    f"torchrun runs on {', '.join(waiting)} only, and waits for the others: {_idle(job, waiting)}",
                )
            ]
        if job.launchers is not None and waiting:
            return [
                Finding(
                    "separate-groups",
                    f"torchrun runs on {', '.join(waiting)}, and they do not find each other",
                    detail=job.output[-3000:],
                )
            ]
        seen = f"the job ends ({job.state}) before it has started {PROGRAM}: {job.last_error}"
        return [Finding("no-training", seen, detail=job.output[-3000:])]
    if len(hosts) < shape.nodes:
        return [
            Finding(
                "one-node-only", f"all {len(starts)} processes run on {', '.join(sorted(hosts))}: {_idle(job, hosts)}"
            )
        ]
    groups = {_group(start) for start in starts}
    if len(groups) > 1:
        each = len(starts) // len(groups)
        seen = f"{len(starts)} processes in {len(groups)} groups of {each}: each trains by itself, and all write one snapshot"
        return [Finding("separate-groups", seen)]
    found = []
    lost = [start for start in starts if "RANK" not in start["environment"] or "WORLD_SIZE" not in start["environment"]]
    if lost:
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in lost[0]["environment"]]
        return [
            Finding("no-group", f"{len(lost)} of {len(starts)} processes do not know their {' and '.join(missing)}")
        ]
    worlds = {start["environment"]["WORLD_SIZE"] for start in starts}
    ranks = sorted(int(start["environment"]["RANK"]) for start in starts)
    expected = shape.nodes * shape.gpus
    if worlds != {str(len(starts))} or ranks != list(range(len(starts))):
        seen = (
            f"{len(starts)} processes were started, with the ranks {ranks} and WORLD_SIZE {', '.join(sorted(worlds))}"
        )
        return [Finding("wrong-group", seen, detail=job.output[-3000:])]
    if len(starts) != expected:
        found.append(Finding("wrong-group", f"{len(starts)} processes for {expected} GPUs"))
    found += _local_ranks(starts) + _cores(starts, shape)
    done = job.epochs == list(range(EPOCHS)) and job.state == "COMPLETED"
    tasks = next((int(each[1]) for start in starts if (each := re.search(r"Tasks=(\d+)", start["step"]))), 0)
    if by_torchrun and tasks > len(hosts) and not done:
        seen = f"srun starts {tasks} torchruns on {len(hosts)} nodes, where one on each starts its processes: {job.last_error}"
        found.append(Finding("wrong-group", seen, detail=job.output[-3000:]))
    elif not job.epochs:
        seen = f"its processes start, and do not find each other: {job.last_error}"
        found.append(Finding("separate-groups", seen, detail=job.output[-3000:]))
    elif not done:
        found.append(Finding("crash", f"the job ends as {job.state}: {job.last_error}", detail=job.output[-3000:]))
    return found


def _idle(job: Job, busy) -> str:
    idle = [node for node in job.nodes if node not in busy]
    return f"{', '.join(idle)} {'is' if len(idle) == 1 else 'are'} paid for and idle" if idle else "no other node"


def _group(start: dict) -> tuple:
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return tuple(start["environment"].get(name) for name in names)


def _local_ranks(starts: list[dict]) -> list[Finding]:
    """The processes of a node have the local ranks from 0 on."""
    for host in sorted({start["host"] for start in starts}):
        here = [start["environment"] for start in starts if start["host"] == host]
        ranks = sorted(each.get("LOCAL_RANK", "none") for each in here)
        if ranks != [str(number) for number in range(len(here))]:
            return [Finding("device-index", f"the processes on {host} have the local ranks {', '.join(ranks)}")]
        sizes = {each.get("LOCAL_WORLD_SIZE", "none") for each in here}
        if sizes != {str(len(here))}:
            return [
                Finding(
                    "device-index", f"{len(here)} processes on {host} have LOCAL_WORLD_SIZE {', '.join(sorted(sizes))}"
                )
            ]
    return []


def _cores(starts: list[dict], shape: Shape) -> list[Finding]:
    """Each task has its cores, and its processes compute with them."""
    found = []
    steps = [start["step"] for start in starts if start["step"]]
    if steps:
        each = re.search(r"TresPerTask=\S*cpu:(\d+)", steps[0])
        whole, tasks = re.search(r"\bCPUs=(\d+)", steps[0]), re.search(r"Tasks=(\d+)", steps[0])
        per_step = re.search(r"TresPerStep=\S*cpu:(\d+)", steps[0])
        cores = int(each[1]) if each else int((per_step or whole)[1]) // int(tasks[1])
        if cores < shape.cores:
            seen = f"srun gives each task {cores} of the {shape.cores} cores that the job has for it"
            found.append(Finding("cores-lost", seen))
    processes = len(starts) // len({start["host"] for start in starts}) / shape.tasks
    threads = {start["environment"].get("OMP_NUM_THREADS", "none") for start in starts}
    wanted = shape.cores / processes
    if threads != {f"{wanted:g}"} and not found:
        seen = f"each process has {wanted:g} cores, and OMP_NUM_THREADS is {', '.join(sorted(threads))}"
        found.append(Finding("cores-lost", seen))
    return found


def other_shape(first: Job, second: Job, shape: Shape) -> list[Finding]:
    """What shows when the same script runs on other nodes in another shape."""
    what = f"with sbatch --nodes={shape.nodes} --gpus-per-node={shape.gpus}"
    wrong = launch_findings(second, shape, native=False)
    places = [_place(job) for job in (first, second)]
    if places[1] and places[1][0].partition(".")[0] not in second.nodes:
        return [
            Finding(
                "meeting-place",
                f"on {second.nodes[0]} to {second.nodes[-1]} the processes still look for {places[1][0]}",
            )
        ]
    if wrong:
        return [Finding("shape-fixed", f"{what}: {wrong[0].seen}", detail=wrong[0].detail)]
    if all(places) and places[0][1] == places[1][1]:
        return [Finding("port-fixed", f"two jobs use the port {places[0][1]}")]
    return []


def _place(job: Job) -> tuple[str, str] | None:
    """The host and the port at which a job's processes look for each other."""
    for words in [*(start["launcher"] for start in job.starts), *job.commands]:
        for at, word in enumerate(words):
            if word.replace("_", "-").startswith("--rdzv-endpoint"):
                host, _, port = (word.partition("=")[2] or words[at + 1]).rpartition(":")
                return host, port
    for start in job.starts:
        if "MASTER_ADDR" in start["environment"]:
            return start["environment"]["MASTER_ADDR"], start["environment"]["MASTER_PORT"]
    return None


def _requeued(bench: _Bench, exercise: Exercise) -> list[Finding]:
    """The goals of a script that survives a dead node and its time limit."""
    asked, has = bench.request()
    options = [] if asked == TORCHRUN else TORCHRUN.options("gres" in has)
    with ThreadPoolExecutor(1) as pool:
        after_death = pool.submit(_node_dies, bench, options, has.get("open-mode") == "a")
        try:
            found = _time_is_over(bench, options, has.get("signal", ""))
        except BaseException:
            bench.cluster.end()  # Ctrl-C: the other trial then ends at once, too
            raise
        return [*after_death.result(), *found]


def _node_dies(bench: _Bench, options: list[str], appends: bool) -> list[Finding]:
    """Kill a node under a job."""
    trial = bench.trial()
    job = trial.submit([*options, "--exclude=node[4-6]"], ["--epochs", str(LONG)])
    if not trial.follow(job, until=lambda job: len(job.epochs) >= 2):
        return [_no_start(job)]
    bench.cluster.fault("kill", job.nodes[-1])
    trial.follow(job, until=lambda job: job.restarts > 0, stall=30)  # nothing moves until Slurm gives the node up
    if job.restarts == 0:
        seen = f"{job.nodes[-1]} died in epoch {len(job.epochs) + 1}, and the job is over ({job.state}); nobody starts it again"
        return [Finding("not-requeued", seen, detail=job.output[-3000:])]
    found = _goes_on(trial, job)
    if not found and not appends:
        found = [Finding("log-overwritten", "the second start writes over the log of the first")]
    return found


def _time_is_over(bench: _Bench, options: list[str], signal: str) -> list[Finding]:
    """Tell a job that its time is nearly over, as Slurm does."""
    if not signal:
        return [
            Finding("no-warning", "the job does not ask to be told before its time is over, and is killed at the limit")
        ]
    to, _, name = signal.partition("@")[0].rpartition(":")
    if "B" not in to:
        return [
            Finding(
                "no-warning",
                f"--signal={signal} goes to the processes that srun has started; the script is not told (B:)",
            )
        ]
    trial = bench.trial()
    job = trial.submit([*options, "--exclude=node[1-3]"], ["--epochs", str(LONG)])
    if not trial.follow(job, until=lambda job: len(job.epochs) >= 2):
        return [_no_start(job)]
    trial.on_login("scancel", "--batch", f"--signal={name}", job.number)
    end = time.monotonic() + 8
    trial.follow(job, until=lambda job: job.restarts > 0 or time.monotonic() > end, stall=30)
    if job.restarts:
        return _goes_on(trial, job)
    if job.state == "RUNNING":
        trial.cancel(job)
        return [
            Finding("trap-late", f"{name} was sent, and 8 s later nothing has happened: the shell still waits for srun")
        ]
    return [
        Finding("no-warning", f"{name} was sent, and ended the job ({job.state}): nothing puts it back into the queue")
    ]


def _no_start(job: Job) -> Finding:
    return Finding(
        "crash", f"the job ends as {job.state}, in its first epochs: {job.last_error}", detail=job.output[-3000:]
    )


def _goes_on(trial: Trial, job: Job) -> list[Finding]:
    """Whether a job that waits in the queue again carries on where it was."""
    before = len(job.epochs)
    trial.start_again(job)
    trial.follow(job, until=lambda job: len(job.epochs) >= before + 3)
    trial.cancel(job)
    epochs = job.epochs
    if len(epochs) <= before:
        return [
            Finding("resume-fails", f"the second start trains nothing: {job.last_error}", detail=job.output[-3000:])
        ]
    if epochs[before] == 0:
        return [Finding("never-resumes", f"after {before} epochs the second start begins with epoch 1 again")]
    if epochs != list(range(len(epochs))):
        return [Finding("epoch-repeated", f"the epochs are {[epoch + 1 for epoch in epochs]}")]
    return []


def _really(bench: _Bench) -> list[Finding]:
    """The script with the real training."""
    trial = bench.trial(program=None)
    job = trial.submit([], ["--epochs", "1", "--batch-size", "32", "--snapshot", "real.pt"])
    trial.follow(job)
    log = read_log(trial.folder / "real.pt")
    if job.state != "COMPLETED" or not log:
        return [
            Finding(
                "crash",
                f"with the real training the job ends as {job.state}: {job.last_error}",
                detail=job.output[-3000:],
            )
        ]
    if log[-1]["processes"] != 4:
        return [Finding("wrong-group", f"the real training has {log[-1]['processes']} processes in place of 4")]
    return []
