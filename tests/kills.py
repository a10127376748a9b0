"""Kill training runs at random moments with kill -9, and compare how they end with a run that nobody has killed.

``PYTHONPATH=tests python -m kills epochs steps`` kills 100 runs of each way to save checkpoints, and writes the results. If you
stop it and start it again, it continues. The runs use the real torchrun, but fork from this process, which has imported torch.
"""

import argparse
import fcntl
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path

import psutil
import torch
import torch.distributed.run as torchrun
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

import runs
from workshop.data import datasets
from workshop.files import write_atomically
from workshop.run.machine import machine
from workshop.run.processes import family
from workshop.training.models import SmallCNN

STAGE = runs.ROOT / "slurm-multinode"
EPOCHS, STEPS = 3, 6  # of the runs: the small data set has 6 global batches of 16 samples
PATIENCE = 400  # seconds after which a run counts as hanging
KINDS = (
    "worker",
    "torchrun",
    "worker",
    "node",
    "torchrun",
    "worker",
    "node",
    "torchrun",
    "worker",
    "node",
)  # ten kills in a row
MOMENTS = ("training", "writing", "starting", "writing", "training", "writing", "training")


@dataclass(frozen=True)
class Way:
    """A way of saving checkpoints.

    Attributes:
        script: the program.
        place: where it saves, relative to its working folder: a file or a folder.
        options: its options, except for the number of epochs and the batch size.
        unit: the number of steps in the unit that the program counts: "training on cpu from epoch 2".
        saves: the number of checkpoints of a run.
    """

    name: str
    script: Path
    place: str
    options: tuple[str, ...]
    unit: int
    saves: int

    def writing(self, folder: Path) -> set[str]:
        """Return the temporary names in the folder of a run: checkpoints that a process writes, or did not complete."""
        where = folder / self.place if self.name == "steps" else folder
        with suppress(FileNotFoundError):
            return {name for name in os.listdir(where) if name.endswith(".tmp")}
        return set()

    def content(self, folder: Path) -> dict:
        """Return the last checkpoint of a run: parameters, optimizer state, position."""
        if self.name == "epochs":
            return runs.load(folder / self.place)
        whole = folder / "whole.pt"
        dcp_to_torch_save(max((folder / self.place).glob("step-*[0-9]")), whole)
        return runs.load(whole)["state"]


EVERY = 3  # steps between two checkpoints
WAYS = {
    way.name: way
    for way in (
        Way("epochs", STAGE / "multigpu_torchrun.py", "run.pt", ("--checkpoint", "run.pt"), STEPS, EPOCHS),
        Way(
            "steps",
            STAGE / "surviving" / "checkpoint_steps.py",
            "run",
            ("--folder", "run", "--save-every", str(EVERY)),
            1,
            EPOCHS * STEPS // EVERY,
        ),
    )
}


@dataclass
class Run:
    """A run that forked from this process: one torchrun, or one for each of two nodes.

    Attributes:
        agents: the process IDs of torchrun.
        output: the file with everything that they and their workers print.
    """

    agents: list[int]
    output: Path
    statuses: dict[int, int] = field(default_factory=dict)

    def ended(self) -> bool:
        """Return whether all torchruns have ended, and note their exit statuses."""
        for agent in self.agents:
            if agent not in self.statuses:
                found, status = os.waitpid(agent, os.WNOHANG)
                if found:
                    self.statuses[agent] = os.waitstatus_to_exitcode(status)
        return len(self.statuses) == len(self.agents)

    def wait(self) -> int | None:
        """Return the exit status: 0 if that of all torchruns is 0; None if they still run after ``PATIENCE`` seconds."""
        if not until(self.ended):
            return None
        return next((status for status in self.statuses.values() if status), 0)

    def workers(self, node: int = 0) -> list[psutil.Process]:
        """Return the workers of a node, by rank."""
        with suppress(psutil.NoSuchProcess):
            return sorted(psutil.Process(self.agents[node]).children(), key=lambda each: each.pid)
        return []

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def end(self) -> None:
        """Kill what is left of the run."""
        for agent in self.agents:
            for process in family(agent) if agent not in self.statuses else ():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        until(self.ended)


def until(condition: Callable[[], bool], seconds: float = PATIENCE, pause: float = 0.02) -> bool:
    """Wait until a condition is true, and return whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def start(
    way: Way, folder: Path, nodes: int = 1, small: bool = True, *more: str, patch: Callable = lambda: None
) -> Run:
    """Start a run with two processes in a folder: on one node, or with a torchrun for each of two nodes.

    Args:
        small: use 96 samples of the digits, so that a run takes a second.
        more: more options of the program.
        patch: a function that the new process calls first.
    """
    output = folder / f"output-{time.monotonic_ns()}.txt"
    size = ("--epochs", str(EPOCHS), "--batch-size", "8" if small else "64")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    shape = ["--standalone", "--nproc-per-node=2"]
    if nodes == 2:
        shape = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    command = [*shape, "--local-addr=127.0.0.1", "--max-restarts=3" if nodes == 1 else "--max-restarts=0"]
    command += ["--start-method=fork", "--run-path", str(way.script), *size, *way.options, *more]
    agents = [_fork(folder, output, command, node, small, patch) for node in range(nodes)]
    return Run(agents, output)


def _fork(folder: Path, output: Path, command: list[str], node: int, small: bool, patch: Callable) -> int:
    """Start torchrun in a forked process, and return its process ID."""
    if child := os.fork():
        return child
    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.path.insert(0, str(STAGE / "surviving"))  # where Python looks first when it starts the program itself
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
            "1"  # restarted workers must not find the addresses of killed ones
        )
        end_at_sigterm()
        count_steps(folder)
        if small:
            small_digits()
        patch()
        torchrun.main(command)
        status = 0
    except BaseException as error:
        print(f"torchrun ended with {type(error).__name__}", flush=True)
    finally:
        os._exit(status)


def end_at_sigterm() -> None:
    """Let SIGTERM end a worker at once, as in a new interpreter: a forked worker has inherited the handler of torchrun."""
    run_script = torchrun.run_script_path

    @wraps(run_script)
    def changed(*arguments):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run_script(*arguments)

    torchrun.run_script_path = changed


def warm_up() -> None:
    """Import everything that the programs need, also what PyTorch imports at the first step, so that the forked runs need not."""
    import torch._dynamo
    import tqdm  # noqa: F401
    from torchvision import transforms  # noqa: F401

    import workshop.training.logs  # noqa: F401

    torch.set_num_threads(1)  # a forked process has no other threads, so an operation with several threads would hang
    datasets.load_dataset("digits")
    model = SmallCNN()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(2, 1, 28, 28)).sum().backward()
    optimizer.step()
    get_state_dict(model, optimizer)


def small_digits() -> None:
    """Make the data set small: 96 samples to train with, and 32 to test with."""
    whole = datasets.Digits.__init__

    def shortened(self, train, transform=None):
        whole(self, train, transform)
        size = 96 if train else 32
        self.images, self.labels = self.images[:size], self.labels[:size]

    datasets.Digits.__init__ = shortened


def count_steps(folder: Path) -> None:
    """Note each step of an optimizer in the file ``steps-PID``."""
    step = torch.optim.AdamW.step

    def counted(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        if self.param_groups[0]["lr"] > 0:  # DCP takes a step with learning rate 0 to create the optimizer state
            with open(folder / f"steps-{os.getpid()}", "ab", 0) as file:
                file.write(b".")
        return result

    torch.optim.AdamW.step = counted


def steps_done(folder: Path) -> int:
    """Return the number of steps that the processes of the first start of a run have taken."""
    return max((path.stat().st_size for path in folder.glob("steps-*")), default=0)


def equal(one, other) -> bool:
    """Return whether two checkpoints are equal, each tensor bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# ---------------------------------------------------------------- one kill


def moment_comes(way: Way, run: Run, folder: Path, moment: str, chance: random.Random) -> bool:
    """Wait for the moment of the kill; return False if the run has ended before.

    Args:
        moment: "starting": in the first two seconds; "training": soon after a random step; "writing": while the run writes one of
            its checkpoints, or just after it.
    """
    if moment == "starting":
        return not until(run.ended, chance.uniform(0, 2))
    if moment == "training":
        steps = chance.randint(0, EPOCHS * STEPS)
        until(lambda: run.ended() or steps_done(folder) >= steps, pause=0.005)
        return not until(run.ended, chance.uniform(0, 0.5))
    number, times, before, seen = chance.randint(1, way.saves), 0, set(), set()
    while times < number:
        if run.ended():
            return False
        now = way.writing(folder)
        times += len(now - before if way.name == "epochs" else now - seen)
        seen, before = seen | now, now
        time.sleep(0.0005)
    time.sleep(chance.uniform(0, 0.02))
    return not run.ended()


def kill(kind: str, way: Way, run: Run, moment: str, chance: random.Random) -> list[psutil.Process]:
    """Kill a part of a run; return what must end by itself."""
    if kind == "worker":
        workers = run.workers()
        if workers:  # in the epoch-wise program, rank 0 writes
            writes = moment == "writing" and way.name == "epochs"
            (workers[0] if writes else chance.choice(workers)).kill()
        return []
    node = chance.randrange(len(run.agents))
    workers = run.workers(node)
    psutil.Process(run.agents[node]).kill()
    if kind == "torchrun":
        return workers
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    # As Slurm does when it requeues a job: it ends what is left on the other node.
    other = run.agents[1 - node]
    left = family(other)
    os.kill(other, signal.SIGTERM)
    return left


def one_kill(way: Way, kind: str, moment: str, seed: str, expected: dict, place: Path) -> dict | None:
    """Kill one run, let it resume, and return a row of the table; None if the run ended before its kill.

    Args:
        seed: the seed of the moment and of the victim.
        expected: the last checkpoint of a run that nobody has killed.
        place: a folder for the run.
    """
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix=f"{way.name}-", dir=place))
    nodes = 2 if kind == "node" else 1
    begin = time.monotonic()
    first = again = start(way, folder, nodes)
    try:
        if not moment_comes(way, first, folder, moment, chance):
            return None
        after = time.monotonic() - begin
        orphans = kill(kind, way, first, moment, chance)
        writing, done = bool(way.writing(folder)), steps_done(folder)
        if kind != "worker":
            again = start(way, folder, nodes)  # at once: processes of the first start may still run
        alone = until(lambda: not any(map(alive, orphans)), 90)
        status, text = again.wait(), again.text()
    finally:
        first.end()
        again.end()
    begun = re.findall(r"training on \w+ from \w+ (\d+)", text)
    resumed = (int(begun[-1]) - 1) * way.unit if begun else EPOCHS * STEPS
    finished = status == 0 or "already holds 3 epochs" in text  # the run was complete when it was killed
    same = finished and equal(way.content(folder), expected)
    tidy = alone and not way.writing(folder) and len(list((folder / way.place).glob("*"))) <= 2
    row = {"way": way.name, "kind": kind, "moment": moment, "seed": seed, "after_seconds": round(after, 2)}
    row |= {"writing": writing, "steps_done": done, "resumed_from": resumed, "status": status}
    row |= {"same": same, "tidy": tidy, "seconds": round(time.monotonic() - begin, 1)}
    if same and tidy:
        shutil.rmtree(folder)
    return row


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def undisturbed(way: Way, place: Path, small: bool = True) -> dict:
    """Return the last checkpoint of a run that nobody kills."""
    folder = Path(tempfile.mkdtemp(prefix=f"peace-{way.name}-", dir=place))
    run = start(way, folder, small=small)
    try:
        assert run.wait() == 0, run.text()
    finally:
        run.end()
    return way.content(folder)


# ---------------------------------------------------------------- many kills


def kill_number(way: Way, number: int, expected: dict, place: Path) -> dict:
    """Kill one run, and return its row. The number determines what is killed, and when."""
    kind, moment = KINDS[number % len(KINDS)], MOMENTS[number % len(MOMENTS)]
    for attempt in range(10):  # a run that ends before its kill does not count
        seed = f"{way.name} {number} {attempt}"
        if row := one_kill(way, kind, moment, seed, expected, place):
            return {"kill": number, **row}
    raise RuntimeError(f"ten runs in a row ended before their kill: {seed}")


def read(result: Path) -> list[dict]:
    """Return the rows of a file of results; none if it does not exist."""
    return json.loads(result.read_text())["kills"] if result.exists() else []


def add(row: dict, result: Path, about: dict) -> None:
    """Add a row to a file of results, which several processes may extend."""
    held = os.open(result.parent, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        rows = sorted([*read(result), row], key=lambda row: row["kill"])
        good = sum(row["same"] and row.get("tidy", True) for row in rows)
        whole = {**about, "as_undisturbed": good, "of": len(rows), "kills": rows}
        write_atomically(result, json.dumps(whole, indent=1) + "\n")
    finally:
        os.close(held)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", choices=WAYS, nargs="+")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at the same time")
    parser.add_argument("--place", help="folder for the runs; None: the folder for temporary files")
    parser.add_argument("--output", default=runs.ROOT / "results", type=Path, help="folder for the results")
    args = parser.parse_args()
    results = {name: args.output / f"kills-{name}-2-cores.json" for name in args.ways}
    warm_up()
    place = Path(tempfile.mkdtemp(prefix="kills-", dir=args.place))
    expected = {name: undisturbed(WAYS[name], place) for name in args.ways}
    done = {name: {row["kill"] for row in read(result)} for name, result in results.items()}
    left = [(name, number) for number in range(args.count) for name in args.ways if number not in done[name]]
    about = {
        "machine": machine(),
        "command": "PYTHONPATH=tests python -m kills epochs steps",
        "file_system": file_system(place),
    }

    def work(kills: list) -> None:
        for name, number in kills:
            row = kill_number(WAYS[name], number, expected[name], place)
            print(json.dumps(row), flush=True)
            add(row, results[name], about)

    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(left[job :: args.jobs],)) for job in range(args.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rows = [row for result in results.values() for row in read(result)]
    bad = len(rows) < args.count * len(args.ways) or not all(row["same"] and row["tidy"] for row in rows)
    if not bad:
        shutil.rmtree(place)
    return bad


def file_system(place: Path) -> str:
    """Return the type of the file system of a folder, such as ext4."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return next(mounts[str(each)] for each in (place, *place.parents) if str(each) in mounts)


if __name__ == "__main__":
    sys.exit(main())
