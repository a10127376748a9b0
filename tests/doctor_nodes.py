"""Measure how reliably ``workshop doctor --nodes`` names a slow node, for results/doctor-nodes-2-cores.json.

    python -m doctor_nodes 10 > results/doctor-nodes-2-cores.json

starts the programs of the command on three nodes of a practice cluster, and lets them measure 10 times healthy nodes and 10 times
nodes of which one is slow. It limits the processor time of node3 with a cgroup (version 1), or the network of node2 with tc.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import psutil

from workshop.doctor.nodes.compare import METRICS, slow_nodes
from workshop.doctor.nodes.lead import Lead
from workshop.repository import ROOT
from workshop.run.machine import machine
from workshop.slurm import cluster as practice

AGENT = "import sys; from workshop.doctor.nodes.agent import Agent, connect; Agent().work(connect('login', int(sys.argv[1])))"
GROUP = Path("/sys/fs/cgroup/cpu/workshop-doctor")
NAMES = ["node1", "node2", "node3"]


@contextmanager
def slow_cores(process: psutil.Process) -> Iterator[None]:
    """Give a process 2 % of the time of a core."""
    GROUP.mkdir()
    (GROUP / "cpu.cfs_quota_us").write_text("2000")  # in each period of 100,000 microseconds
    (GROUP / "cgroup.procs").write_text(str(process.pid))
    try:
        yield
    finally:
        (GROUP.parent / "cgroup.procs").write_text(str(process.pid))
        GROUP.rmdir()


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
    return _start(cluster, folder, "", "-m", "workshop", "doctor", *words)


def _start(cluster: practice.Cluster, folder: Path, node: str, *words: str, run=subprocess.run, **options):
    """Run Python on a node, with the modules of the course and of its tests."""
    path = f"PYTHONPATH={ROOT}{os.pathsep}{ROOT / 'tests'}"
    inside = cluster.inside(["env", path, f"SLURMD_NODENAME={node}", sys.executable, "-P", *words], node, folder)
    options = options or {"capture_output": True, "timeout": 300}
    return run(inside, env=practice.environment(), text=True, **options)


def lead() -> None:
    """Lead the agents on the login node: measure once for each line of standard input, and print the result."""
    leader = Lead(0, NAMES)
    print(leader.port, flush=True)
    leader.gather()
    for _ in sys.stdin:
        leader.passes = 0
        for member in leader.members:
            member.values = {}
        begin = time.monotonic()
        leader.measure()
        result = {"passes": leader.passes, "seconds": round(time.monotonic() - begin, 1), "nodes": leader.nodes}
        print(json.dumps(result), flush=True)


def rounded(node: dict) -> dict:
    """Return the best values of a node, in the units of the table."""
    return {key: round(metric.best(node[key]) / metric.size, 3) for key, metric in METRICS.items() if key in node}


def main() -> None:
    """Measure healthy nodes the given number of times, and after each time nodes of which one is slow."""
    times, rows, here = int(sys.argv[1]), [], Path.cwd()
    cluster = practice.up(3, name="doctornodes", mine=True)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    leader = _start(cluster, here, "", "-m", "doctor_nodes", "lead", run=subprocess.Popen, **pipes)
    port = leader.stdout.readline().strip()
    agents = [_start(cluster, here, name, "-c", AGENT, port, run=subprocess.Popen, stdin=None) for name in NAMES]

    def measured(case: str, fault) -> None:
        with fault:
            load = psutil.getloadavg()[0]
            leader.stdin.write("\n")
            leader.stdin.flush()
            result = json.loads(leader.stdout.readline())
        nodes = result.pop("nodes")
        named = [each.node for each in slow_nodes(nodes)]
        row = {"case": case, "named": named, "load": round(load, 1), **result}
        rows.append(row | {"nodes": {name: rounded(node) for name, node in nodes.items()}})
        print(f"{case}, load {load:.1f}: {named}", file=sys.stderr, flush=True)

    try:
        measured("first", nullcontext())
        rows.clear()
        python = [psutil.Process(agents[2].pid), *psutil.Process(agents[2].pid).children(recursive=True)][-1]
        for number in range(times):
            measured("healthy", nullcontext())
            if number % 2:
                measured("node2 sends at most 100 Mbit/s", slow_network(cluster, "node2"))
            else:
                measured("node3 gets 2 % of the time of a core", slow_cores(python))
    finally:
        cluster.end()
        for process in (leader, *agents):
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        print(json.dumps({"machine": machine(), "command": f"python -m doctor_nodes {times}", "runs": rows}, indent=1))


if __name__ == "__main__":
    lead() if sys.argv[1] == "lead" else main()
