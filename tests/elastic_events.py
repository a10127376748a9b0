"""Let nodes leave and join an elastic training at random moments, and verify what it has trained on. Print JSON.

    OMP_NUM_THREADS=1 python tests/elastic_events.py --events 20 > results/elastic-2-cores.json

A node is a torchrun with one worker on this machine. With --cluster, the nodes are those of a practice cluster, and elastic.sh
starts them. Standard error shows each event.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import psutil
import torch

from workshop.run.environment import environment, loopback, torchrun
from workshop.run.machine import machine
from workshop.run.processes import Background, family
from workshop.slurm import cluster as practice

SURVIVING = ROOT / "slurm-multinode" / "surviving"
BATCH, SAVE_EVERY, SAMPLES = 100, 4, 1437  # 100 is not divisible by 3, and 1437 not by 100
RATE = 1e-3
STALL = 180  # seconds without a step after which the survivors count as hanging


def training(folder: Path, epochs: int) -> list[str]:
    """Return the program and its options."""
    options = {"epochs": epochs, "batch-size": BATCH, "micro-batch": 40, "save-every": SAVE_EVERY, "learning-rate": RATE,
               "dtype": "float64", "checkpoint": folder / "run.pt", "record": folder / "record"}  # fmt: skip
    return [str(SURVIVING / "elastic.py"), *(f"--{name}={value}" for name, value in options.items())]


def variables() -> dict[str, str]:
    """Return the environment of all nodes. Each rendezvous needs a new store, see README.md of the stage."""
    loop = loopback()
    return environment(
        gpus=False, GLOO_SOCKET_IFNAME=loop, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, STORE_HOST="127.0.0.1"
    )


class Group:
    """An elastic training of up to three nodes on this machine.

    Args:
        folder: a new folder for its files.
        epochs: how long it trains.
        seed: of the random moments.
    """

    def __init__(self, folder: Path, epochs: int, seed: int):
        self.folder, self.epochs, self.chance = folder, epochs, random.Random(seed)
        self.nodes: list[Background] = []
        self.left: list[Background] = []
        store = [sys.executable, "-P", SURVIVING / "rendezvous_store.py", folder / "store"]
        self.store = Background(store, folder, variables())
        self._until((folder / "store").exists, "the rendezvous store does not start", 120)
        self.address = (folder / "store").read_text().strip()

    def join(self) -> None:
        """Start a node."""
        meeting = ["--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=100", "--rdzv-id=elastic", "--rdzv-backend=c10d",
                   f"--rdzv-endpoint={self.address}", "--rdzv-conf=is_host=0,last_call_timeout=5"]  # fmt: skip
        command = [word for word in torchrun(1) if word not in ("--standalone", "--nproc-per-node=1")]
        self.nodes.append(
            Background([*command, *meeting, *training(self.folder, self.epochs)], self.folder, variables())
        )

    def leave(self, how: str) -> None:
        """End a node: its torchrun with SIGTERM or SIGKILL, or all its processes at the same moment."""
        node = self.nodes.pop(self.chance.randrange(len(self.nodes)))
        self.left.append(node)
        members = family(node.process.pid) if how == "the whole node" else [psutil.Process(node.process.pid)]
        for process in members:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)

    def lines(self) -> list[dict]:
        """Return everything that the ranks have recorded, in the order of the starts."""
        found = []
        for file in sorted((self.folder / "record").glob("*.jsonl")):
            for line in file.read_text().splitlines():
                with suppress(json.JSONDecodeError):  # the line that a kill has cut short
                    found.append(json.loads(line))
        return sorted(found, key=lambda line: line["start"])

    def position(self) -> tuple[int, int, int, int]:
        """Return the start, the number of ranks, the epoch and the step of the last line."""
        last = max(self.lines(), key=lambda line: (line["start"], line["epoch"], line["step"]), default=None)
        return (last["start"], last["ranks"], last["epoch"], last["step"]) if last else (0, 0, 0, 0)

    def _until(self, condition, problem: str, limit: float) -> None:
        try:
            _wait(condition, problem, limit)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.said()}") from None

    def said(self) -> str:
        """Return the last lines that each node has printed."""
        return "\n".join(f"--- node\n{node.text()[-3000:]}" for node in (*self.left, *self.nodes))

    def trains_with(self, nodes: int, since: int, limit: float = STALL) -> None:
        """Wait until a start after ``since`` with this number of ranks has taken a step; raises TimeoutError."""
        self._until(lambda: self.ended() or self._new(nodes, since), f"no step with {nodes} nodes", limit)

    def _new(self, nodes: int, since: int) -> bool:
        return any(line["start"] > since and line["ranks"] == nodes and "loss" in line for line in self.lines())

    def ended(self) -> bool:
        """Return whether all nodes have ended."""
        return all(node.process.poll() is not None for node in self.nodes)

    def close(self) -> None:
        """End everything."""
        for each in (*self.nodes, *self.left, self.store):
            each.end(grace=2)


def run(folder: Path, epochs: int, events: int, seed: int) -> dict:
    """Train with events at random moments; return a row for each event, and what was trained."""
    group = Group(folder, epochs, seed)
    chance, rows, began = group.chance, [], time.monotonic()
    try:
        for _ in range(2):
            group.join()
        group.trains_with(2, 0)
        while len(rows) < events:
            time.sleep(chance.uniform(1, 15))
            start, _, epoch, step = group.position()
            if epoch >= epochs - 1 or group.ended():
                break
            before = len(group.nodes)
            how = ""
            if before == 1 or (before < 3 and chance.random() < 0.5):
                group.join()
            else:
                how = chance.choice(("SIGTERM", "SIGKILL", "the whole node"))
                group.leave(how)
            event, moment, clock = "leaves: " + how if how else "joins", time.monotonic(), time.time_ns()
            row = {"event": event, "second": round(moment - began, 1), "epoch": epoch, "step": step,
                   "nodes_before": before, "nodes_after": len(group.nodes)}  # fmt: skip
            # In one case of three, the next event comes while the ranks still meet.
            if chance.random() < 1 / 3 and len(rows) + 1 < events:
                time.sleep(chance.uniform(0, 10))
                row["seconds_until_training"] = None
            else:
                group.trains_with(len(group.nodes), start)
                row["seconds_until_training"] = round(time.monotonic() - moment, 1)
            rows.append(row | {"clock": clock})
            print(json.dumps(row), file=sys.stderr, flush=True)
        group._until(group.ended, "the nodes do not end", 20 * 60)
        statuses = [node.process.returncode for node in group.nodes]
        lines = group.lines()
        for row in rows:  # where the first start after the event has resumed, if this event alone caused it
            later = next((line for line in lines if line["start"] > row["clock"]), None)
            row["resumed_from"] = later["from"] if later and row["seconds_until_training"] is not None else None
            del row["clock"]
        return {
            "events": rows,
            "statuses": statuses,
            "seconds": round(time.monotonic() - began),
            **judge(lines, epochs),
        }
    except (TimeoutError, psutil.Error) as problem:
        print(problem, file=sys.stderr)
        return {"events": rows, "problem": str(problem).splitlines()[0]}
    finally:
        group.close()


class Job:
    """The same on a practice cluster: jobs of elastic.sh, whose nodes leave and join."""

    def __init__(self, folder: Path, epochs: int, cluster: practice.Cluster):
        self.folder, self.epochs, self.cluster = folder, epochs, cluster
        for file in ("elastic.sh", "elastic.py", "rendezvous_store.py"):
            shutil.copy(SURVIVING / file, folder)

    def submit(self, nodes: int, **variables: str) -> str:
        """Submit elastic.sh and return the number of the job."""
        given = [
            f"{name}={value}"
            for name, value in (variables | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}).items()
        ]
        options = [word for word in training(self.folder, self.epochs)[1:] if "--checkpoint" not in word]
        command = [
            "sbatch",
            "--parsable",
            "--time=60",
            f"--nodes={nodes}",
            f"--chdir={self.folder}",
            "elastic.sh",
            *options,
        ]
        done = subprocess.run(
            self.cluster.inside(["env", *given, *command], folder=self.folder),
            env=practice.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def state(self, number: str) -> str:
        """Return the state of a job."""
        said = self.cluster.run("scontrol", "--oneliner", "show", "job", number)
        return re.search(r"JobState=(\w+)", said)[1]

    lines = Group.lines
    position = Group.position
    _new = Group._new


def run_on_cluster(folder: Path, epochs: int) -> dict:
    """Train on three nodes of a practice cluster; one leaves with scancel, one joins as a job of its own, and one dies."""
    expected = fixed(folder / "fixed", epochs)
    cluster = practice.up(4, gpus=1, name=f"elastic{os.getpid()}", mine=True)
    try:
        job = Job(folder, epochs, cluster)
        first, rows = job.submit(3), []
        events = (
            ("leaves: scancel of its step", lambda: cluster.run("scancel", f"{first}.1"), 2),
            ("joins: a job of its own", lambda: job.submit(1, JOIN=first), 3),
            ("leaves: the node dies", lambda: cluster.fault("kill", "node3"), 2),
        )
        _wait(lambda: job._new(3, 0), "no step with 3 nodes")
        for event, act, nodes in events:
            start, _, epoch, step = job.position()
            moment, clock = time.monotonic(), time.time_ns()
            act()
            _wait(lambda: job._new(nodes, start), f"after {event}: no step with {nodes} nodes")  # noqa: B023
            seconds = round(time.monotonic() - moment, 1)
            later = next(line for line in job.lines() if line["start"] > clock)
            rows.append({"event": event, "epoch": epoch, "step": step, "nodes_after": nodes, "seconds_until_training": seconds,
                         "resumed_from": later["from"]})  # fmt: skip
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        _wait(lambda: job.state(first) != "RUNNING", "the job does not end", 20 * 60)
        found = judge(job.lines(), epochs)
        own, saved = found.pop("losses"), folder / "runs" / f"elastic-{first}.pt"
        return {"events": rows, "state": job.state(first), **found, "losses_compared": len(own),
                "loss_difference": max(abs(own[at] - expected[at]) for at in own),
                "parameter_difference": difference(saved, folder / "fixed" / "run.pt")}  # fmt: skip
    finally:
        cluster.end()


def _wait(condition, problem: str, limit: float = STALL) -> None:
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(problem)
        time.sleep(0.3)


def judge(lines: list[dict], epochs: int) -> dict:
    """Follow the checkpoints through all starts, and count what the final parameters have been trained on.

    A start resumes at a step, so the steps of earlier starts from there on do not count: the parameters never saw them.
    """
    starts: dict[int, dict] = {}
    for line in lines:
        start = starts.setdefault(
            line["start"], {"from": tuple(line["from"]), "ranks": line["ranks"], "steps": defaultdict(dict)}
        )
        start["steps"][line["epoch"], line["step"]].setdefault(line["rank"], {}).update(line)
    trained: dict[tuple[int, int], tuple[int, dict]] = {}
    repeated = 0
    for start in (starts[name] for name in sorted(starts)):
        dropped = [at for at in trained if at >= start["from"]]
        repeated += len(dropped)
        for at in dropped:
            del trained[at]
        trained |= {at: (start["ranks"], by_rank) for at, by_rank in start["steps"].items()}
    lost = twice = 0
    sizes, rates = set(), set()
    for epoch in range(epochs):
        seen: dict[int, int] = defaultdict(int)
        for (_, step), (_, by_rank) in sorted(item for item in trained.items() if item[0][0] == epoch):
            samples = [sample for line in by_rank.values() for sample in line["samples"]]
            for sample in samples:
                seen[sample] += 1
            if step < SAMPLES // BATCH:  # the last batch of an epoch has the rest
                sizes.add(len(samples))
            rates |= {line["rate"] for line in by_rank.values()}
        lost += SAMPLES - len(seen)
        twice += sum(count - 1 for count in seen.values())
    return {"starts": len(starts), "ranks": sorted({start["ranks"] for start in starts.values()}), "steps": len(trained),
            "steps_repeated": repeated, "samples_lost": lost, "samples_twice": twice, "global_batches": sorted(sizes),
            "learning_rates": sorted(rates), "losses": losses(trained)}  # fmt: skip


def losses(trained: dict) -> dict[str, float]:
    """Return the loss of each step whose ranks have all recorded it: the sum of their shares."""
    complete = {
        at: by_rank
        for at, (ranks, by_rank) in trained.items()
        if sum("loss" in line for line in by_rank.values()) == ranks
    }
    return {
        f"{epoch}/{step}": sum(line["loss"] for line in lines.values())
        for (epoch, step), lines in sorted(complete.items())
    }


def fixed(folder: Path, epochs: int) -> dict[str, float]:
    """Train undisturbed with two ranks on one node; return the loss of each step."""
    folder.mkdir()
    done = Background([*torchrun(2), *training(folder, epochs)], folder, variables())
    try:
        if done.wait(30 * 60) != 0:
            sys.exit(done.text())
    finally:
        done.end()
    group = Group.__new__(Group)
    group.folder = folder
    return judge(group.lines(), epochs)["losses"]


def difference(one: Path, other: Path) -> float:
    """Return the largest difference between two parameters of two checkpoints."""
    a, b = (torch.load(path, weights_only=True)["model"] for path in (one, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def measure(events: int, epochs: int, seed: int, place: Path) -> dict:
    """Run trainings until there were enough events; return the result."""
    expected = fixed(place / "fixed", epochs)
    runs: list[dict] = []
    while (done := sum(len(each["events"]) for each in runs)) < events:
        folder = place / f"run-{len(runs)}"
        folder.mkdir()
        result = run(folder, epochs, events - done, seed + len(runs))
        if "problem" not in result:
            own = result.pop("losses")
            result["losses_compared"] = len(own)
            result["loss_difference"] = max(abs(own[at] - expected[at]) for at in own)
            result["parameter_difference"] = difference(folder / "run.pt", place / "fixed" / "run.pt")
        runs.append(result)
        print(
            json.dumps({name: value for name, value in result.items() if name != "events"}), file=sys.stderr, flush=True
        )
        if "problem" in result and not result["events"]:
            break
    return {"command": f"OMP_NUM_THREADS=1 python tests/elastic_events.py --events {events} --epochs {epochs} --seed {seed}",
            "machine": machine(), "steps_between_checkpoints": SAVE_EVERY, "epochs": epochs, "runs": runs}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cluster", action="store_true", help="three events on a practice cluster, without --events")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="elastic-") as place:
        if args.cluster:
            command = f"OMP_NUM_THREADS=1 python tests/elastic_events.py --cluster --epochs {args.epochs}"
            result = {"command": command, "machine": machine(), **run_on_cluster(Path(place), args.epochs)}
        else:
            result = measure(args.events, args.epochs, args.seed, Path(place))
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
