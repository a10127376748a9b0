"""Disturb a training with tolerate.py on three nodes of a practice cluster, and compare it with an undisturbed one. Print JSON.

``OMP_NUM_THREADS=1 python tests/tolerate_nodes.py > results/tolerate-cluster-2-cores.json`` writes the committed result.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

from workshop.repository import ROOT
from workshop.run.machine import machine
from workshop.slurm import cluster as practice

SURVIVING = ROOT / "slurm-multinode" / "surviving"
STEPS = 800
PATIENCE = 5  # seconds after which a silent replica is killed
LIMIT = 300  # seconds that an event may take


class Job:
    """A job of tolerate.sh on three nodes, and the nodes that join it."""

    def __init__(self, cluster: practice.Cluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        for file in ("tolerate.sh", "tolerate.py", "lighthouse.py"):
            shutil.copy(SURVIVING / file, folder)
        self.number = self.submit("--nodelist=node[1-3]")
        self.log = folder / "runs" / f"tolerate-{self.number}.jsonl"

    def submit(self, *shape: str, **variables: str) -> str:
        """Submit tolerate.sh and return the number of the job."""
        variables |= {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
        given = [f"{name}={value}" for name, value in variables.items()]
        command = ["sbatch", "--parsable", *shape, f"--chdir={self.folder}", "tolerate.sh"]
        options = [f"--steps={STEPS}", f"--patience={PATIENCE}"]
        done = subprocess.run(
            self.cluster.inside(["env", *given, *command, *options], folder=self.folder),
            env=practice.environment(), capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    def steps(self) -> list[dict]:
        """Return the lines of its log."""
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def text(self) -> str:
        """Return what the jobs have printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("tolerate-*.log")))

    def replica(self, node: str) -> psutil.Process:
        """Return the replica of a node."""
        (found,) = (
            process
            for process in psutil.process_iter(["cmdline"])
            if "--join" in (process.info["cmdline"] or [])
            and process.cwd() == str(self.folder)
            and process.environ()["SLURMD_NODENAME"] == node
        )
        return found

    def wait(self, condition, problem: str) -> None:
        """Wait until a condition is true.

        Raises:
            AssertionError: it is not true after LIMIT seconds.
        """
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, f"{problem}:\n{self.text()}"
            time.sleep(0.05)

    def position(self, replicas: int, start: int) -> int | None:
        """Return the place of the first line from ``start`` with this number of replicas; None: there is none."""
        places = (place for place, step in enumerate(self.steps()) if place >= start and step["replicas"] == replicas)
        return next(places, None)

    def disturb(self, act, replicas: list[int]) -> dict:
        """Disturb the training, wait for these numbers of replicas, and return what it has cost."""
        begin, invalid = len(self.steps()), self.text().count("is not valid")
        act()
        end = begin
        for number in replicas:
            self.wait(lambda: self.position(number, end) is not None, f"no step with {number} replicas")  # noqa: B023
            end = self.position(number, end)
        times = [step["time"] for step in self.steps()[max(0, begin - 1) : end + 1]]
        pause = max(later - earlier for earlier, later in pairwise(times))
        repeated = self.text().count("is not valid") - invalid
        return {"after_step": begin, "steps_repeated": repeated, "longest_pause_seconds": round(pause, 2)}


def undisturbed(folder: Path, replicas: int) -> list[float]:
    """Train on this machine, and return the losses."""
    options = ["--log=undisturbed.jsonl", f"--replicas={replicas}", f"--steps={STEPS}"]
    command = [sys.executable, SURVIVING / "tolerate.py", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line)["loss"] for line in (folder / "undisturbed.jsonl").read_text().splitlines()]


def apart(losses: list[float], others: list[float]) -> float:
    """Return the largest difference."""
    return max(abs(one - two) for one, two in zip(losses, others, strict=False))


def measure(folder: Path) -> dict:
    """Disturb a job in five ways, and return a row for each, and how its losses differ from those of an undisturbed training."""
    expected, fewer = undisturbed(folder, 3), undisturbed(folder, 2)
    cluster = practice.up(4, gpus=1, name=f"tolerate{os.getpid()}", mine=True)
    try:
        job, rows = Job(cluster, folder), []
        job.wait(lambda: job.steps() and job.steps()[-1]["replicas"] == 3, "no step with 3 replicas")
        for event, act, replicas in (
            ("a replica is killed", lambda: job.replica("node2").kill(), [2, 3]),
            ("a replica hangs", lambda: job.replica("node3").send_signal(signal.SIGSTOP), [2, 3]),
            ("a node dies", lambda: cluster.fault("kill", "node3"), [2]),
            ("a node joins", lambda: job.submit("--nodes=1", "--nodelist=node4", JOIN=job.number), [3]),
            ("the network of a node is cut", lambda: cluster.fault("cut", "node2"), [2]),
        ):
            rows.append({"event": event} | job.disturb(act, replicas))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

        def state():
            return re.search(r"JobState=(\w+)", cluster.run("scontrol", "--oneliner", "show", "job", job.number))[1]

        job.wait(lambda: len(job.steps()) == STEPS and state() != "RUNNING", "the job does not end")
        losses = [step["loss"] for step in job.steps()]
        assert [step["step"] for step in job.steps()] == list(range(1, STEPS + 1))
        # Rounding grows with the steps, also if only the number of replicas differs.
        compared = {"disturbed": losses, "two replicas": fewer}
        differences = {
            steps: {name: apart(each[:steps], expected) for name, each in compared.items()}
            for steps in (50, 150, 300, STEPS)
        }
        return {"events": rows, "state": state(), "steps": STEPS, "first_loss": expected[0], "last_loss": expected[-1],
                "largest_difference_from_three_undisturbed_replicas": differences}  # fmt: skip
    finally:
        cluster.end()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tolerate-") as place:
        found = measure(Path(place))
    command = "OMP_NUM_THREADS=1 python tests/tolerate_nodes.py"
    print(json.dumps({"command": command, "machine": machine(), "patience": PATIENCE, **found}, indent=1))
