"""Checking a job script: it runs as a job on a Slurm of its own, on this machine, and what came of it is looked at.

The Slurm is the one of ``workshop cluster``, brought up for the check and gone after it. In the place of the training program a
small one runs, ``job_program.py``, which notes on which node, as which rank and with how many cores each process finds itself.
"""

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from workshop.repository import ROOT
from workshop.slurm import cluster as practice
from workshop.slurm.cluster import FINAL

PROGRAM = "multigpu_torchrun.py"
STALL = 10  # seconds in which nothing moves
MEETING = 25  # the same before the program has started: torchruns that look for each other rest for longer each time
LIMIT = 120  # seconds that a job may take
LIMIT_REAL = 300  # the same where it trains for real, and not with a stand-in for the program


@dataclass(frozen=True)
class Shape:
    """What a job asks for.

    Attributes:
        nodes: nodes.
        gpus: GPUs on each of them.
        tasks: tasks on each.
        cores: cores for each task.
    """

    nodes: int
    gpus: int
    tasks: int
    cores: int

    def options(self, gres: bool) -> list[str]:
        """As options of sbatch; ``gres``: GPUs by --gres. What a script asks for in the one way, the other does not replace."""
        return [
            f"--nodes={self.nodes}",
            f"--gres=gpu:{self.gpus}" if gres else f"--gpus-per-node={self.gpus}",
            f"--ntasks-per-node={self.tasks}",
            f"--cpus-per-task={self.cores}",
        ]

    def __str__(self):
        return (
            f"{_count(self.nodes, 'node')} with {_count(self.gpus, 'GPU')} and {_count(self.tasks, 'task')} each, "
            f"{_count(self.cores, 'core')} a task"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclass
class Job:
    """A job and what is known about it.

    Attributes:
        number: its job id.
        notes: what its processes have noted, in the order of time.
        asked: the options that sbatch took from the script and the command line, such as {"signal": "B:USR1@60"}.
        state: as Slurm names it.
        nodes: the nodes that it had last.
        restarts: how often it was started again.
        output: what it has printed.
        launchers: for each node the torchruns that were there when it stalled; None: it did not stall.
        commands: the command lines of these.
    """

    number: str
    asked: dict[str, str] = field(default_factory=dict)
    notes: list[dict] = field(default_factory=list)
    state: str = "PENDING"
    nodes: list[str] = field(default_factory=list)
    restarts: int = 0
    output: str = ""
    launchers: dict[str, int] | None = None
    commands: list[list[str]] = field(default_factory=list)

    @property
    def starts(self) -> list[dict]:
        """The processes of the program."""
        return [note for note in self.notes if note["event"] == "start"]

    @property
    def epochs(self) -> list[int]:
        """The epochs in the order in which they were trained."""
        return [note["epoch"] for note in self.notes if note["event"] == "epoch"]

    @property
    def last_error(self) -> str:
        """The line of its output that says most about what went wrong."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"error|not found|cannot|No such", line, re.IGNORECASE)]
        return (telling or lines or ["it printed nothing"])[-1][:300]


class Trial:
    """A folder and a cluster in which a script is tried.

    Args:
        script: the job script.
        place: a folder of the check.
        cluster: a cluster that is up.
        program: what stands for multigpu_torchrun.py; None: the real one.
    """

    def __init__(self, script: Path, place: Path, cluster: practice.Cluster, program: Path | None):
        self.script, self.cluster = script, cluster
        self.limit = LIMIT if program else LIMIT_REAL
        self.folder = Path(tempfile.mkdtemp(prefix="trial-", dir=place))
        for helper in ("first_failure.py", PROGRAM):
            shutil.copy(ROOT / "slurm-multinode" / helper, self.folder)
        if program:
            shutil.copy(program, self.folder / PROGRAM)
        shutil.copy(script, self.folder)

    def on_login(self, *command: str) -> subprocess.CompletedProcess:
        """Run a command on the cluster's login node, in the folder of the trial."""
        return subprocess.run(
            self.cluster.inside(command, folder=self.folder),
            env=practice.environment() | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def submit(self, options: list[str], arguments: list[str], script: str = "") -> Job:
        """Submit the script, or another one in its folder.

        Raises:
            Refused: sbatch does not take it.
        """
        # The partition of a learner's own site is not known here.
        options = ["--partition=normal", *options]
        done = self.on_login("sbatch", "--verbose", "--parsable", *options, script or self.script.name, *arguments)
        if done.returncode != 0:
            raise Refused(" ".join(line for line in done.stderr.splitlines() if "error" in line))
        return Job(done.stdout.strip(), dict(re.findall(r"sbatch: ([\w-]+) +: (\S+)", done.stderr)))

    def look(self, job: Job) -> None:
        """Bring what is known about a job up to date."""
        text = self.on_login("scontrol", "--oneliner", "show", "job", job.number).stdout
        if not text and not psutil.pid_exists(self.cluster.first):
            raise RuntimeError("the practice cluster has ended under the check")
        known = dict(word.split("=", 1) for word in text.split() if "=" in word)
        job.state, job.restarts = known.get("JobState", "UNKNOWN"), int(known.get("Restarts", 0))
        listed = known.get("NodeList", "(null)")
        if listed != "(null)":
            job.nodes = self.on_login("scontrol", "show", "hostnames", listed).stdout.split()
        output = Path(known.get("StdOut", ""))
        if output.is_file():
            job.output = output.read_text(errors="replace")
        notes = []
        for file in self.folder.glob("notes/*.jsonl"):
            for line in file.read_text().splitlines():
                with suppress(json.JSONDecodeError):  # a line that is just being written
                    notes.append(json.loads(line))
        job.notes = sorted((note for note in notes if note["job"] == job.number), key=lambda note: note["time"])

    def follow(self, job: Job, until: Callable[[Job], bool] | None = None, stall: float = 0) -> bool:
        """Follow a job until ``until(job)`` holds or it has ended; whether it came to that. One that stands still is ended."""
        end, known, looks = time.monotonic() + self.limit, (), []
        while True:
            self.look(job)
            if until and until(job):
                return True
            if job.state in FINAL:
                return until is None
            if (len(job.notes), job.state) != known or job.state != "RUNNING":
                known, looks = (len(job.notes), job.state), []
            looks.append((time.monotonic(), *self._work()))
            if self._stands_still(looks, stall or (STALL if job.starts else MEETING)) or time.monotonic() > end:
                job.launchers = self._launchers(job)
                self.cancel(job)
                return False
            time.sleep(0.2)

    @staticmethod
    def _stands_still(looks: list[tuple[float, bool, float]], stall: float) -> bool:
        """Whether next to nothing was computed in the last seconds; processes that wait for others look for them now and then.

        On a crowded machine a process that wants to compute may get little time: then it is seen to be busy.
        """
        last = [look for look in looks if look[0] > looks[-1][0] - stall]
        if len(last) == len(looks):
            return False
        busy = sum(look[1] for look in last) / len(last)
        return busy < 0.2 and last[-1][2] - last[0][2] < 0.05 * stall

    def start_again(self, job: Job) -> None:
        """Start a job that has been put back into the queue: Slurm would let it wait there for two minutes.

        It is put back when its old nodes have been cleared up, and only then the time of its start is set.
        """
        if self.follow(job, until=lambda job: job.state == "PENDING"):
            self.on_login("scontrol", "update", f"JobId={job.number}", "StartTime=now")

    def cancel(self, job: Job) -> None:
        """End a job, and wait until it is over."""
        self.on_login("scancel", job.number)
        end = time.monotonic() + 20
        while job.state not in FINAL and time.monotonic() < end:
            time.sleep(0.1)
            self.look(job)

    def _members(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return psutil.Process(self.cluster.first).children(recursive=True)
        return []

    def _work(self) -> tuple[bool, float]:
        """Whether a process on the cluster is computing, and the seconds of computing of all of them."""
        busy, seconds = False, 0.0
        for process in self._members():
            with suppress(psutil.Error):
                if process.name().startswith(("python", "pt_")):
                    busy = busy or process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
                    seconds += sum(process.cpu_times()[:2])
        return busy, seconds

    def _launchers(self, job: Job) -> dict[str, int]:
        """How many torchruns of a job there are on each of its nodes."""
        found = dict.fromkeys(job.nodes, 0)
        for process in self._members():
            with suppress(psutil.Error, KeyError):
                line, environment = process.cmdline(), process.environ()
                torchrun = "torch.distributed.run" in line or "torchrun" in {Path(word).name for word in line[:2]}
                if torchrun and environment["SLURM_JOB_ID"] == job.number:
                    found[environment["SLURMD_NODENAME"]] += 1
                    job.commands.append(line)
        return found


class Refused(Exception):
    """sbatch does not take a script; the message is Slurm's."""
