"""Start a program with its real launcher: mp.spawn, torchrun after kill -9, Slurm's variables; and measure its speed.

The functions judge nothing: each one starts the program and returns what it has observed.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch

from workshop.check.evidence.real import Killed, Kills, RealRun, Speeds
from workshop.check.forked import Program
from workshop.check.launching import run_program
from workshop.course.exercises import Exercise
from workshop.repository import ROOT
from workshop.run.environment import environment, torchrun
from workshop.run.processes import Background
from workshop.training.logs import read_log

LIMIT = 90  # the maximum duration of a real run in seconds
CHECKPOINT = "run.pt"


class _Real(Background):
    """A program that runs in the background with its real launcher.

    Args:
        command: the program and its options.
        folder: its working directory, which is created if necessary.
        changes: additional environment variables.
        gpus: whether it can use the GPUs.
    """

    def __init__(self, command: Sequence[object], folder: Path, changes: Mapping[str, str], gpus: bool = False):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        variables = {"PYTHONDONTWRITEBYTECODE": "1", "NPROC": "2", **changes}
        super().__init__(command, folder, environment(gpus=gpus, **variables))

    def to_end(self) -> int | None:
        """Wait for the end of the program, and kill what is left of it; return the exit status, or None after ``LIMIT``."""
        try:
            return self.wait(LIMIT)
        finally:
            self.end()


def _observed(
    command: Sequence[object], folder: Path, checkpoint: str, environments: Sequence[Mapping[str, str]] = ({},)
) -> RealRun:
    """Start a command once per environment, all at the same time, and wait until all have ended."""
    started: list[_Real] = []
    try:
        started += (_Real(command, folder, changes) for changes in environments)
        statuses = tuple(run.wait(LIMIT) for run in started)
    finally:
        for run in started:
            run.end()
    text = "\n".join(run.text() for run in started)
    saved = folder / checkpoint
    processes = () if saved.is_dir() else tuple(int(entry["processes"]) for entry in read_log(saved))
    return RealRun(statuses, text, LIMIT, processes, saved.exists())


def spawned(script: Path, solution: Path, place: Path) -> RealRun:
    """Run a program with mp.spawn, which starts a new interpreter per process, and not with forked ranks."""
    options = ["--nproc", "2", "--epochs", "1", "--checkpoint", CHECKPOINT]
    run = _observed([sys.executable, script, *options], place / "spawned", CHECKPOINT)
    # Forked ranks compute bit for bit the same, and start faster.
    folder = _forked(solution, options, "spawn", place / "solution")[1]
    return replace(run, losses=_losses(place / "spawned"), expected=_losses(folder))


def started(script: Path, exercise: Exercise, has: Callable[[str], bool], place: Path) -> RealRun:
    """Train for one epoch with the runner of a program, or with torchrun; ``has`` says which options the program has."""
    given = {"--epochs": "1", "--checkpoint": CHECKPOINT, "--folder": "run"}
    options = [part for name, value in given.items() if has(name) for part in (name, value)]
    saved = next((value for name, value in given.items() if name != "--epochs" and has(name)), ".")
    run = _observed([*_command(script, exercise), *options], place / "started", saved, [{"OMP_NUM_THREADS": "1"}])
    return replace(run, launcher="torchrun")


def _losses(folder: Path) -> tuple[float, ...]:
    """The losses of the first epoch in the log of a run."""
    log = read_log(folder / CHECKPOINT)
    return tuple(map(float, log[0]["losses"])) if log else ()


def _forked(script: Path, options: Sequence[str], launch: str, folder: Path) -> tuple[int | None, Path]:
    """Run a program with two forked ranks and without probes; return its exit status and the folder."""
    folder.mkdir()
    run = run_program(Program(script=script, arguments=tuple(options), launch=launch, nproc=2, scratch=folder))
    return run.status, folder


# ---------------------------------------------------------------- Lightning, which starts its processes itself

# The variables that a program inherits from a Jupyter session on a cluster, which is a Slurm job with one task.
SESSION = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "jupyter", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0",
           "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node1"}  # fmt: skip
# The variables that srun sets for both tasks of a job on one node; SLURM_PROCID and SLURM_LOCALID differ.
TASKS = {**SESSION, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2",
         "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "0", "SLURM_NODELIST": "localhost"}  # fmt: skip


def _lightning(script: Path, folder: Path, environments: Sequence[Mapping[str, str]]) -> RealRun:
    command = [sys.executable, script, "--devices", 2, "--epochs", 1, "--batch-size", 32, "--checkpoint", "run.ckpt"]
    return _observed(command, folder, "run.ckpt", [{"OMP_NUM_THREADS": "1", **changes} for changes in environments])


def alone(script: Path, place: Path) -> RealRun:
    """Start one process, and let Lightning start the second one."""
    return _lightning(script, place / "alone", [{}])


def in_session(script: Path, place: Path) -> RealRun:
    """Start one process inside a job with one task, and let Lightning start the second one."""
    return _lightning(script, place / "session", [SESSION])


def as_tasks(script: Path, place: Path) -> RealRun:
    """Start two processes as srun does."""
    port = {"SLURM_JOB_ID": str(os.getpid())}  # Lightning derives the port from the last digits
    ranks = ({"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2))
    return _lightning(script, place / "tasks", [TASKS | port | rank for rank in ranks])


# ---------------------------------------------------------------- kill -9


def kills(script: Path, exercise: Exercise, place: Path) -> Kills:
    """Kill a worker in one run and torchrun in a second run after the first epoch; let both runs train to the end."""
    options = ["--epochs", "2", "--checkpoint", CHECKPOINT]
    # The uninterrupted run, for comparison. Forked ranks compute bit for bit the same, and start faster.
    status, _ = _forked(script, options, "torchrun", place / "uninterrupted")
    if status != 0:
        return Kills(status)
    command, changes = _command(script, exercise), {"OMP_NUM_THREADS": "1"}
    if len(command) > 1:
        changes["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as the solution's runner does
    with ThreadPoolExecutor(2) as both:  # starting Python takes most of the time, so two runs can share two cores
        worker, killed = (
            both.submit(partial(kill, [*command, *options], changes, place)) for kill in (_kill_worker, _kill_torchrun)
        )
        return Kills(0, worker.result(), killed.result())


def _command(script: Path, exercise: Exercise) -> list[object]:
    """Return the command of the learner: the runner beside the script, or else the command of the solution's runner."""
    runner = script.with_name(exercise.runner.name) if exercise.runner else None
    if runner and runner.exists() and ROOT in script.parents:  # a runner works only inside the repository
        return [runner]
    return [*torchrun(2, "--max-restarts=3"), script]


def _first_epoch(run: _Real) -> tuple[bool, list[psutil.Process]]:
    """Wait for the end of the first epoch; return whether the run reached it, and the workers of torchrun."""
    reached = run.wait_for("epoch 1/2", LIMIT)
    return reached, run.workers() if reached else []


def _kill_worker(command: Sequence[object], changes: Mapping[str, str], place: Path) -> Killed:
    run = _Real(command, place / "worker", changes)
    try:
        reached, workers = _first_epoch(run)
        if len(workers) != 2:
            return Killed(reached, len(workers), run.text())
        shared = workers[1].environ().get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") not in ("1", "true", "True")
        workers[1].kill()
        status = run.wait(LIMIT)
    finally:
        run.end()
    gap = _difference(status, place, run.folder)
    return Killed(True, 2, run.text(), shared_store=shared, status=status, difference=gap)


def _runs(process: psutil.Process) -> bool:
    """Whether a process runs. One that has ended stays in the table until its parent, here one that adopted it, waits for it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill_torchrun(command: Sequence[object], changes: Mapping[str, str], place: Path) -> Killed:
    run = _Real(command, place / "torchrun", changes)
    try:
        reached, workers = _first_epoch(run)
        if len(workers) != 2:
            return Killed(reached, len(workers), run.text())
        if launcher := workers[0].parent():  # torchrun, which may be a child of the runner
            launcher.kill()
        run.wait(LIMIT)
        _, alive = psutil.wait_procs(workers, timeout=5)
        alive = [worker for worker in alive if _runs(worker)]
        for worker in alive:
            worker.kill()
        if alive:
            return Killed(True, 2, run.text(), orphans=len(alive))
    finally:
        run.end()
    again = _Real(command, run.folder, changes)
    status = again.to_end()
    return Killed(True, 2, again.text(), status=status, difference=_difference(status, place, again.folder))


def _difference(status: int | None, place: Path, folder: Path) -> float | None:
    """Compare the checkpoint of a run with the one of the uninterrupted run: see ``Killed.difference``."""
    if status != 0 or not (folder / CHECKPOINT).exists():
        return None
    one, other = (
        # weights_only=False is safe: the learner's own program has just written this file, and it may contain any object.
        _tensors(torch.load(path / CHECKPOINT, map_location="cpu", weights_only=False))
        for path in (place / "uninterrupted", folder)
    )
    if one.keys() != other.keys():
        return math.inf
    return max((float((one[name].double() - other[name].double()).abs().max()) for name in one), default=0.0)


def _tensors(value: object, name: str = "") -> dict[str, torch.Tensor]:
    """Return all tensors in a checkpoint, by their paths in the nested dictionaries."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    found: dict[str, torch.Tensor] = {}
    for key, item in value.items() if isinstance(value, dict) else ():
        found |= _tensors(item, f"{name}/{key}")
    return found


# ---------------------------------------------------------------- speed


ROUNDS = 4  # starts of each program before one is called slower
CLEARLY = 1.1  # times the samples per second of the other program
LATE = 60.0  # seconds after which a program that is as fast as the other one gets no further turns


def speeds(script: Path, solution: Path, place: Path, gpus: bool) -> Speeds:
    """Measure the samples per second of a program and of the solution in turn, until both are settled.

    Each run counts with its fastest epoch, because other load on the machine can only make a program slower.
    """
    turns: dict[Path, list[float]] = {script: [], solution: []}
    start = time.monotonic()
    while undecided(turns[script], turns[solution], time.monotonic() - start):
        for name, (program, best) in zip(("own", "solution"), turns.items(), strict=True):
            command = [sys.executable, program, "--epochs", 3, "--checkpoint", CHECKPOINT]
            run = _Real(command, place / f"{name}-{len(best)}", {}, gpus)
            if run.to_end() != 0:
                return Speeds((), (), run.text() or "no output")
            epochs = [float(entry["samples_per_second"]) for entry in read_log(run.folder / CHECKPOINT)]
            if not epochs:
                return Speeds((), ())
            best.append(max(epochs))
    return Speeds(tuple(turns[script]), tuple(turns[solution]))


def undecided(own: Sequence[float], other: Sequence[float], seconds: float) -> bool:
    """Return whether both programs get another turn. Before a program is called slower, it gets several."""
    slower = max(own, default=0.0) * CLEARLY < max(other, default=1.0)
    return (slower and len(own) < ROUNDS) or ((slower or seconds < LATE) and not (settled(own) and settled(other)))


def settled(best: Sequence[float]) -> bool:
    """Return whether the two best runs differ by less than 10 %, or there were five runs."""
    top = sorted(best)[-2:]
    return len(best) >= 5 or (len(top) == 2 and top[0] > 0.9 * top[1])
