"""Measure how reliably ``workshop doctor --nodes`` names a slow node, for results/doctor-nodes-2-cores.json.

    python -m doctor_nodes 10 > results/doctor-nodes-2-cores.json

runs it on three nodes of a practice cluster: 10 times on healthy nodes, and 10 times on nodes of which one is slow (its programs
run only a tenth of the time, or its network is slow).
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from workshop.repository import ROOT
from workshop.run.machine import machine
from workshop.slurm import cluster as practice

PERIOD = 0.1  # seconds


def agents(node: str) -> list[psutil.Process]:
    """Return the processes that measure a node."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            named = "workshop.doctor.nodes.agent" in process.cmdline() and process.name() != "srun"
            if named and process.environ().get("SLURMD_NODENAME") == node:
                found.append(process)
    return found


@contextmanager
def slow_cores(node: str) -> Iterator[None]:
    """Stop the programs of a node during 0.09 s of each 0.1 s, as a limit of a cgroup does."""
    over = threading.Event()

    def slow_down() -> None:
        found, looked = [], 0.0
        while not over.is_set():
            if time.monotonic() - looked > 2:
                found, looked = agents(node), time.monotonic()
            for change, seconds in (("suspend", 0.9 * PERIOD), ("resume", 0.1 * PERIOD)):
                for process in found:
                    with suppress(psutil.Error):
                        getattr(process, change)()
                time.sleep(seconds)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def slow_network(cluster: practice.Cluster, node: str) -> Iterator[None]:
    """Limit what a node sends to 100 Mbit/s."""
    limit = ["root", "tbf", "rate", "100mbit", "burst", "256kb", "latency", "50ms"]
    cluster.run("tc", "qdisc", "add", "dev", "eth0", *limit, node=node)
    try:
        yield
    finally:
        cluster.run("tc", "qdisc", "del", "dev", "eth0", "root", node=node)


def doctor(cluster: practice.Cluster, folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run the command on the login node."""
    command = [sys.executable, "-P", "-m", "workshop", "doctor", *words]
    inside = cluster.inside(["env", f"PYTHONPATH={ROOT}", *command], folder=folder)
    return subprocess.run(inside, env=practice.environment(), capture_output=True, text=True, timeout=300)


def main() -> None:
    """Measure healthy nodes the given number of times, and after each time nodes of which one is slow."""
    times = int(sys.argv[1])
    cluster = practice.up(3, name="doctornodes", mine=True)
    faults = {
        "node3 computes a tenth of the time": lambda: slow_cores("node3"),
        "node2 sends at most 100 Mbit/s": lambda: slow_network(cluster, "node2"),
    }
    rows = []
    with TemporaryDirectory() as place:
        for number in range(times):
            fault = list(faults)[number % len(faults)]
            for case, start in (("healthy", nullcontext), (fault, faults[fault])):
                file = Path(place) / "result.json"
                file.unlink(missing_ok=True)
                load = psutil.getloadavg()[0]
                with start():
                    done = doctor(cluster, Path(place), "--nodes", "3x2", "--output", str(file))
                result = json.loads(file.read_text()) if file.exists() else {"slow": [], "error": done.stderr}
                kept = {key: result[key] for key in ("nodes", "passes", "seconds", "slow", "error") if key in result}
                rows.append({"case": case, "load": round(load, 1), "status": done.returncode, **kept})
                named = [each["node"] for each in result["slow"]]
                print(f"{case}, load {load:.1f}: {named} {done.stderr}", file=sys.stderr, flush=True)
    cluster.end()
    print(json.dumps({"machine": machine(), "command": f"python -m doctor_nodes {times}", "runs": rows}, indent=1))


if __name__ == "__main__":
    main()
