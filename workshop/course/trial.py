"""Try a job script: run it as a job on a practice cluster, and record what it does.

By default a small program, ``job_program.py``, replaces the training program. It records the node, the rank and the launcher's
variables of each process.
"""

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from workshop.check.evidence.job import PROGRAM, Job, Start
from workshop.repository import ROOT
from workshop.run.processes import family
from workshop.run.stillness import Patience, Watch
from workshop.slurm import cluster as practice

STAND_IN = Path(__file__).with_name("job_program.py")
STALL = 10  # seconds without progress after which a job counts as hanging
MEETING = 25  # the same before the program has started: each time a rendezvous fails, torchrun waits longer
LIMIT = 120  # the maximum duration of a job in seconds
LIMIT_REAL = 300  # the same for a job with the real training program


class Refused(Exception):
    """Slurm rejects a script; the message is Slurm's."""


class Trial:
    """A folder and a cluster in which a script is tried.

    Args:
        script: the job script.
        place: a folder of the check.
        cluster: a running cluster.
        program: the program that replaces multigpu_torchrun.py; None: use the real one.
    """

    def __init__(self, script: Path, place: Path, cluster: practice.Cluster, program: Path | None = STAND_IN):
        self.script, self.cluster = script, cluster
        self.limit = LIMIT if program else LIMIT_REAL
        self.folder = Path(tempfile.mkdtemp(prefix="trial-", dir=place))
        for helper in ("first_failure.py", PROGRAM):
            shutil.copy(ROOT / "slurm-multinode" / helper, self.folder)
        if program:
            shutil.copy(program, self.folder / PROGRAM)
        shutil.copy(script, self.folder)

    def on_login(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the cluster's login node, in the folder of the trial."""
        return subprocess.run(
            self.cluster.inside(command, folder=self.folder),
            env=practice.environment() | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def submit(self, options: Sequence[str], arguments: Sequence[str], script: str = "") -> Job:
        """Submit the script, or a different script in its folder.

        Raises:
            Refused: sbatch rejects it.
        """
        # The practice cluster does not have the partitions of the learner's site.
        command = ["sbatch", "--verbose", "--parsable", "--partition=normal", *options, script or self.script.name]
        done = self.on_login(*command, *arguments)
        if done.returncode != 0:
            lines = [line.removeprefix("sbatch: ").strip() for line in done.stderr.splitlines()]
            telling = [line for line in lines if re.search("error|unrecognized|invalid|ambiguous", line)]
            said = [line.removeprefix("error: ") for line in telling or lines[-2:]]
            raise Refused(" ".join(said) or "sbatch gives no reason")
        return Job(done.stdout.strip(), dict(re.findall(r"sbatch: ([\w-]+) +: (\S+)", done.stderr)))

    def look(self, job: Job) -> None:
        """Update what is known about a job."""
        text = self.on_login("scontrol", "--oneliner", "show", "job", job.number).stdout
        if not text and not psutil.pid_exists(self.cluster.first):
            raise RuntimeError("the practice cluster ended during the check")
        known = dict(word.split("=", 1) for word in text.split() if "=" in word)
        job.state, job.restarts = known.get("JobState", "UNKNOWN"), int(known.get("Restarts", 0))
        listed = known.get("NodeList", "(null)")
        if listed != "(null)":
            job.nodes = self.on_login("scontrol", "show", "hostnames", listed).stdout.split()
        output = Path(known.get("StdOut", ""))
        if output.is_file():
            job.output = output.read_text(errors="replace")
        notes = self._notes(job)
        job.starts = [
            Start(note["host"], note["environment"], tuple(note["launcher"]), note["step"])
            for note in notes
            if note["event"] == "start"
        ]
        job.epochs = [note["epoch"] for note in notes if note["event"] == "epoch"]

    def failed_at(self, job: Job) -> float:
        """The time at which the stand-in let its last rank fail; now, if it did not."""
        return next((float(note["time"]) for note in self._notes(job) if note["event"] == "fail"), time.time())

    def _notes(self, job: Job) -> list[dict[str, Any]]:
        """Return what the processes of a job have recorded, in chronological order."""
        notes = []
        for file in self.folder.glob("notes/*.jsonl"):
            for line in file.read_text().splitlines():
                with suppress(json.JSONDecodeError):  # the line is still being written
                    notes.append(json.loads(line))
        return sorted((note for note in notes if note["job"] == job.number), key=lambda note: note["time"])

    def follow(self, job: Job, until: Callable[[Job], bool] | None = None, stall: float = 0) -> bool:
        """Wait until ``until(job)`` is true, or by default until the job ends; return whether that happened.

        A job that makes no progress is cancelled.
        """
        end, started, watch = time.monotonic() + self.limit, None, None
        while True:
            self.look(job)
            if until and until(job):
                return True
            if job.state in practice.FINAL:
                return until is None
            if watch is None or started != bool(job.starts):
                started, left = bool(job.starts), end - time.monotonic()
                patience = Patience(stall or (STALL if started else MEETING), busy=self.limit, total=left)
                watch = Watch(self._programs, patience)
            waits = job.state != "RUNNING"  # time in the queue does not count
            if watch.look((len(job.starts), len(job.epochs), job.state, time.monotonic() if waits else 0)):
                self._note_torchruns(job)
                self.cancel(job)
                return False
            time.sleep(0.2)

    def start_again(self, job: Job) -> None:
        """Start a requeued job at once: Slurm would let it wait for two minutes.

        The job is pending again only after Slurm has cleaned up its old nodes, and until then its start time cannot be changed.
        """
        if self.follow(job, until=lambda job: job.state == "PENDING"):
            self.on_login("scontrol", "update", f"JobId={job.number}", "StartTime=now")

    def cancel(self, job: Job) -> None:
        """Cancel a job, and wait until it has ended."""
        self.on_login("scancel", job.number)
        end = time.monotonic() + 20
        while job.state not in practice.FINAL and time.monotonic() < end:
            time.sleep(0.1)
            self.look(job)

    def _programs(self) -> list[psutil.Process]:
        """Return the processes of Python programs on the cluster, without those of Slurm."""
        found = []
        for process in family(self.cluster.first):
            with suppress(psutil.Error):
                if process.name().startswith(("python", "pt_")):
                    found.append(process)
        return found

    def _note_torchruns(self, job: Job) -> None:
        """Record how many torchrun processes of a job run on each of its nodes, and their command lines."""
        job.launchers = dict.fromkeys(job.nodes, 0)
        for process in family(self.cluster.first):
            with suppress(psutil.Error, KeyError):
                line, environment = process.cmdline(), process.environ()
                torchrun = "torch.distributed.run" in line or "torchrun" in {Path(word).name for word in line[:2]}
                if torchrun and environment["SLURM_JOB_ID"] == job.number:
                    job.launchers[environment["SLURMD_NODENAME"]] += 1
                    job.commands.append(line)
