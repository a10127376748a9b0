"""Try a job script: as it is, in a different shape, with a dead node, at its time limit, and with the real training.

The jobs run on a practice cluster of ``workshop cluster``, which the check starts and stops.
"""

import re
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from workshop.check.evidence.job import Job, Request
from workshop.check.rules.jobs import asks_for_its_script
from workshop.check.scenarios import (
    DIRECTIVES,
    JOB,
    JOB_ELSEWHERE,
    JOB_FAILS,
    NODE_DIES,
    REAL_JOB,
    REQUEST,
    TIME_OVER,
    Scenario,
    Unavailable,
)
from workshop.check.subject import Subject
from workshop.course.exercises import Exercise
from workshop.course.job_program import FAILS, LATE
from workshop.course.trial import MEETING, STALL, STAND_IN, Refused, Trial
from workshop.errors import UserError
from workshop.slurm import cluster as practice
from workshop.slurm.model import model
from workshop.slurm.script import ignored_directives
from workshop.slurm.shape import Shape
from workshop.training.logs import read_log

NODES = 6  # for two jobs with two nodes each, and one spare node per job
EPOCHS = 3
LONG = 60  # epochs, so that the job is still running when Slurm notices the dead node
TRAP = 8  # seconds that a script has to requeue its job after the signal before its time limit
# The nodes of the practice cluster, for a controller that runs without nodes.
PRACTICE = """\
NodeName=node[1-4] CPUs=8 RealMemory=512000 Gres=gpu:4
PartitionName=normal Nodes=ALL Default=YES MaxTime=1440 DefMemPerCPU=1000
"""


class JobBench:
    """Makes the scenarios of one job script.

    Args:
        subject: the script.
        exercise: the exercise that the script belongs to; None: the script is judged in the shape that it requests.
        nproc, on_cpu: not used, because jobs run in the shape of the exercise, and on the CPU.
        place: a folder for its files.
    """

    def __init__(self, subject: Subject, exercise: Exercise | None, *, nproc: int, on_cpu: bool, place: Path):
        self.script, self.exercise, self.place = subject.file, exercise, place
        self._said = False  # whether the reason why no job can run here has been given
        self._end: Callable[[], object] = lambda: None

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that this bench can make, in the order in which it makes them."""
        if self.exercise is None:
            return (DIRECTIVES, REQUEST, JOB)
        elsewhere = (JOB_ELSEWHERE,) if self.exercise.other_shape else ()
        return (DIRECTIVES, REQUEST, JOB, *elsewhere, NODE_DIES, TIME_OVER, JOB_FAILS, REAL_JOB)

    def make(self, scenario: Scenario[Any], made: Mapping[Scenario[Any], Any]) -> Any:
        """Make a scenario; see ``judge.Bench``.

        Raises:
            Unavailable: no job can run here.
        """
        makers: dict[Scenario[Any], Callable[[], object]] = {
            DIRECTIVES: self._directives,
            REQUEST: lambda: self._request,
            JOB: self._job,
            JOB_ELSEWHERE: self._elsewhere,
            NODE_DIES: lambda: self._faults[0],
            TIME_OVER: lambda: self._faults[1],
            JOB_FAILS: self._fails,
            REAL_JOB: self._real,
        }
        return makers[scenario]()

    def close(self) -> None:
        """Stop the cluster and everything that runs on it."""
        self._end()

    # ------------------------------------------------------------ the cluster

    @cached_property
    def _cluster(self) -> practice.Cluster | UserError:
        """The cluster, or the error that prevented its start."""
        try:
            cluster = practice.up(NODES, name=f"check{secrets.token_hex(4)}", mine=True)
        except UserError as error:
            return error
        self._end = weakref.finalize(self, cluster.end)  # runs once, at the latest when this object is deleted
        return cluster

    def _trial(self, program: Path | None = STAND_IN) -> Trial:
        """Return a new trial of the script.

        Raises:
            Unavailable: no job can run here; only the first such error contains the reason.
        """
        cluster = self._cluster
        if isinstance(cluster, UserError):
            reason = "" if self._said else f"what the script does: {cluster}"
            self._said = True
            raise Unavailable(reason)
        return Trial(self.script, self.place, cluster, program)

    def _submit(self, trial: Trial, shape: Shape | None, options: Sequence[str], arguments: Sequence[str]) -> Job:
        """Submit the script with this shape, or (None) with the shape that it requests."""
        request = self._request
        if request.asked is None:
            raise Unavailable("")  # Slurm rejects the script, which a different rule has reported already
        ran_in = shape or request.asked
        # --gpus-per-node does not replace a request for GPUs with --gres.
        asks = [] if ran_in == request.asked else ran_in.options(gres="gres" in request.options)
        try:
            job = trial.submit([*asks, *options], arguments)
        except Refused as refusal:
            job = Job(refused=str(refusal))
        job.shape = ran_in
        return job

    # ------------------------------------------------------------ what the script requests

    def _directives(self) -> list[tuple[str, str]]:
        """Return the lines that look like directives but that Slurm ignores: the place and the reason of each."""
        ignored = ignored_directives(self.script.read_text())
        return [(f"{self.script.name}:{number}", reason) for number, reason in ignored]

    @cached_property
    def _request(self) -> Request:
        """How Slurm understands the directives of the script, according to a job that has only these directives."""
        if isinstance(self._cluster, UserError):
            return self._controllers_request()
        trial = self._trial()
        lines = self.script.read_text().splitlines()
        body = next((at for at, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
        (trial.folder / "request.sh").write_text("\n".join([*lines[:body], "env > request.txt", ""]))
        try:
            job = trial.submit([], [], "request.sh")
        except Refused as refusal:
            return Request(None, refused=str(refusal))
        trial.follow(job)
        answer = trial.folder / "request.txt"
        if not answer.exists():
            reason = f"a job with these directives does not run: {job.state} {job.last_error}"
            return Request(None, options=job.options, refused=reason)
        said = dict(line.split("=", 1) for line in answer.read_text().splitlines() if line.startswith("SLURM_"))
        nodes = int(said["SLURM_NNODES"])
        tasks = int(said.get("SLURM_NTASKS", nodes)) // nodes
        shape = Shape(nodes, int(said.get("SLURM_GPUS_ON_NODE", 0)), tasks, int(said.get("SLURM_CPUS_PER_TASK", 1)))
        return Request(shape, self._wanted, job.options)

    @property
    def _wanted(self) -> Shape | None:
        return self.exercise.shape if self.exercise else None

    def _controllers_request(self) -> Request:
        """Return how Slurm's controller alone understands the directives, because no node can be started here.

        Raises:
            Unavailable: no controller can be started either.
        """
        fragment = self.place / "practice.conf"
        fragment.write_text(PRACTICE)
        command = ["sbatch", "--partition=normal", str(self.script)]
        try:
            with model(fragment) as controller:
                taken, reason = controller.test(command)
                known = controller.request(command) if taken else {}
        except UserError:
            self._trial()  # says why there is no cluster
            raise
        if not taken:
            return Request(None, refused=reason, alone=True)
        gpus = re.search(r"gpu\S*[:=](\d+)", known.get("TresPerNode", ""))
        nodes, tasks = known["NumNodes"].partition("-")[0], known["NtasksPerN:B:S:C"].partition(":")[0]
        shape = Shape(_number(nodes), int(gpus[1]) if gpus else 0, _number(tasks), _number(known["CPUs/Task"]))
        return Request(shape, self._wanted, alone=True)

    # ------------------------------------------------------------ trials

    def _job(self) -> Job:
        """Run the script in the shape that it should request."""
        return self._run_to_its_end(self._wanted)

    def _elsewhere(self) -> Job:
        """Run the script in a different shape and on different nodes, so that values that are hard-coded in it are wrong."""
        assert self.exercise is not None
        return self._run_to_its_end(self.exercise.other_shape, "--exclude=node1")

    def _run_to_its_end(self, shape: Shape | None, *options: str) -> Job:
        trial = self._trial()
        job = self._submit(trial, shape, options, ["--epochs", str(EPOCHS)])
        job.epochs_asked = EPOCHS
        if not job.refused:
            trial.follow(job)
        return job

    def _fails(self) -> Job:
        """Run the script with a program whose last rank fails."""
        trial = self._trial()
        (trial.folder / FAILS).touch()
        job = self._submit(trial, self._wanted, [], ["--epochs", str(LONG)])
        if not job.refused:
            trial.follow(job, stall=STALL + LATE)
            job.lasted = time.time() - trial.failed_at(job)
        return job

    def _real(self) -> Job:
        """Run the script as it is, with the real training."""
        trial = self._trial(program=None)
        arguments = ["--epochs", "1", "--batch-size", "32", "--checkpoint", "real.pt"]
        job = self._submit(trial, None, [], arguments)
        if not job.refused:
            trial.follow(job)
            log = read_log(trial.folder / "real.pt")
            job.processes = log[-1]["processes"] if log else 0
        return job

    # ------------------------------------------------------------ a dead node, and the time limit

    @cached_property
    def _faults(self) -> tuple[Job, Job]:
        """The two trials with faults. They run at the same time, because Slurm notices a dead node late."""
        if self._request.asked is None:  # computed here, before there are two threads
            raise Unavailable("")
        trials = self._trial(), self._trial()
        with ThreadPoolExecutor(1) as pool:
            node_dies = pool.submit(self._node_dies, trials[0])
            try:
                time_over = self._time_over(trials[1])
                return node_dies.result(), time_over
            except BaseException:
                self.close()  # after Ctrl-C, this also ends the other trial at once
                raise

    def _node_dies(self, trial: Trial) -> Job:
        """Kill a node of a running job."""
        job = self._trained_for_two_epochs(trial, "--exclude=node[4-6]")
        if job.state in practice.FINAL or job.refused:
            return job
        job.fault = job.nodes[-1]
        trial.cluster.fault("kill", job.fault)
        trial.follow(job, until=lambda job: job.restarts > 0, stall=30)  # no progress until Slurm gives up the node
        return self._second_start(trial, job) if job.restarts else job

    def _time_over(self, trial: Trial) -> Job:
        """Send a job the signal that Slurm sends shortly before the time limit."""
        signal = self._request.options.get("signal", "")
        if not asks_for_its_script(signal):
            return Job(options=self._request.options)
        job = self._trained_for_two_epochs(trial, "--exclude=node[1-3]")
        if job.state in practice.FINAL or job.refused:
            return job
        job.fault = signal.partition("@")[0].rpartition(":")[2]
        trial.on_login("scancel", "--batch", f"--signal={job.fault}", job.number)
        end = time.monotonic() + TRAP
        trial.follow(job, until=lambda job: job.restarts > 0 or time.monotonic() > end, stall=30)
        if job.restarts:
            return self._second_start(trial, job)
        seen = replace(job)
        trial.cancel(job)
        return seen

    def _trained_for_two_epochs(self, trial: Trial, *options: str) -> Job:
        """Submit a long job, and return it when it has trained for two epochs or has ended."""
        job = self._submit(trial, self._wanted, options, ["--epochs", str(LONG)])
        if not job.refused:
            trial.follow(job, until=lambda job: len(job.epochs) >= 2)
        return job

    def _second_start(self, trial: Trial, job: Job) -> Job:
        """Let a requeued job train for three more epochs."""
        job.before = len(job.epochs)
        trial.start_again(job)
        enough = job.before + 3
        trial.follow(job, until=lambda job: len(job.epochs) >= enough, stall=MEETING)  # needs a new rendezvous
        trial.cancel(job)
        return job


def _number(word: str) -> int:
    """Convert a number that Slurm shows; return 1 if Slurm shows that none was requested."""
    return int(word) if word.isdigit() and word != "0" else 1
