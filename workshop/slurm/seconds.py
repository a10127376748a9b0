"""Time the practice cluster, a job on it, and checks of job scripts; python -m workshop.slurm.seconds prints JSON.

"up" and "down": starting and ending a cluster of 4 nodes. "job": launch_ddp_2N4G.sh for 2 epochs, from sbatch to the end of the
job, and also until its first epoch is done. "torchrun": the same program with the same number of processes, without a cluster.
"check": a whole check in a new interpreter, of each exercise as delivered and of its solution.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workshop.repository import ROOT
from workshop.run.machine import machine
from workshop.slurm.cluster import FINAL, Cluster, environment, up

TIMES = 5
STAGE, SOLUTIONS = ROOT / "slurm-multinode", ROOT / "solutions" / "slurm-multinode"


def main() -> None:
    ways = {"up": [], "down": []}
    for _ in range(TIMES):
        start = time.monotonic()
        cluster = up(4, name="seconds", mine=True)
        ready = time.monotonic()
        cluster.end()
        ways["up"].append(round(ready - start, 2))
        ways["down"].append(round(time.monotonic() - ready, 2))
    cluster = up(4, name="seconds", mine=True)
    try:
        jobs = [_job(cluster) for _ in range(TIMES)]
        slurm = cluster.version()
    finally:
        cluster.end()
    ways["job"], ways["job until its first epoch is done"] = map(list, zip(*jobs, strict=True))
    ways["torchrun"] = [_torchrun() for _ in range(TIMES)]
    result = {
        "machine": machine() | {"slurm": slurm},
        "command": "python -m workshop.slurm.seconds",
        "median": {name: statistics.median(seconds) for name, seconds in ways.items()},
        "seconds": ways,
        "check": {path: _check(path) for path in _scripts()},
    }
    print(json.dumps(result, indent=1))


def _job(cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of one job, and the seconds until its first epoch was done."""
    with tempfile.TemporaryDirectory(prefix="workshop-seconds-") as place:
        for path in (SOLUTIONS / "launch_ddp_2N4G.sh", STAGE / "multigpu_torchrun.py", STAGE / "first_failure.py"):
            shutil.copy(path, place)
        start, first = time.monotonic(), 0.0
        command = cluster.inside(["sbatch", "--parsable", "launch_ddp_2N4G.sh", "--epochs", "2"], folder=Path(place))
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        log, state = Path(place) / f"launch_ddp_2N4G-{done.stdout.strip()}.log", ""
        while state not in FINAL:
            time.sleep(0.1)
            if not first and log.exists() and "epoch 1/2" in log.read_text():
                first = time.monotonic() - start
            state = cluster.run(
                "squeue", "--noheader", "--states=all", "--format=%T", "--jobs", done.stdout.strip()
            ).strip()
        if state != "COMPLETED":
            sys.exit(f"the job ended as {state}:\n{log.read_text()}")
        return round(time.monotonic() - start, 1), round(first, 1)


def _torchrun() -> float:
    """Return the seconds of the same training without a cluster."""
    with tempfile.TemporaryDirectory(prefix="workshop-seconds-") as place:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        start = time.monotonic()
        subprocess.run(
            [*command, STAGE / "multigpu_torchrun.py", "--epochs", "2"],
            cwd=place,
            env=environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
            check=True,
            capture_output=True,
        )
        return round(time.monotonic() - start, 1)


def _scripts() -> list[str]:
    """Return the paths of the exercises and their solutions."""
    paths = [path for folder in (STAGE, SOLUTIONS) for path in sorted(folder.glob("exercise*.sh"))]
    return [str(path.relative_to(ROOT)) for path in paths]


def _check(path: str) -> float:
    """Return the seconds of one check."""
    start = time.monotonic()
    command = [sys.executable, "-P", "-m", "workshop", "check", path]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    return round(time.monotonic() - start, 1)


if __name__ == "__main__":
    main()
