"""What only a real launcher shows: spawn's fresh interpreters, torchrun's restarts, kill -9, the speed without a recorder."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from workshop.check.exercises import Exercise
from workshop.check.findings import Finding
from workshop.repository import ROOT, python_path
from workshop.run.environment import torchrun, without_launcher
from workshop.run.processes import Background
from workshop.training.logs import read_log

LIMIT = 90  # seconds that a real run may take
SLOWER = 1.15  # times the solution's time


def real_part(exercise: Exercise) -> Callable[[Path, Exercise, Path, bool], list[Finding]] | None:
    """The function that checks this exercise with a real launcher, given whether GPUs are to be hidden; None: nothing to see."""
    if exercise.launch == "spawn":
        return _spawn
    if "lightning" in exercise.name:
        return _lightning
    if "not-restarted" in exercise.kinds:
        return _kills
    if "slower" in exercise.kinds:
        return _speed
    return None


class _Real(Background):
    """A program that runs for real, on the CPU unless the settings say otherwise.

    Args:
        command: the program and its options.
        folder: where it runs; it is made.
        settings: further environment variables; None: not set.
    """

    def __init__(self, command: list, folder: Path, **settings: str | None):
        environment = without_launcher(os.environ)
        environment |= {"PYTHONPATH": python_path(), "WORKSHOP_PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "NPROC": "2"} | settings
        environment = {name: value for name, value in environment.items() if value is not None}
        folder.mkdir(exist_ok=True)
        self.folder = folder
        super().__init__(command, folder, environment)

    def started(self) -> list[Finding]:
        """Wait for the end of its first epoch: why it does not come there with two processes of torchrun's; empty if it does."""
        if not self.wait_for("epoch 1/2", LIMIT):
            seen = f"with the real torchrun it does not reach the end of epoch 1: {_last_error(self.text())}"
            return [Finding("crash", seen, detail=self.text()[-3000:])]
        count = len(self.workers())
        if count != 2:
            seen = f"2 processes were asked for, and {count or 'none'} came from torchrun"
            return [Finding("no-group", seen, detail=self.text()[-3000:])]
        return []


def _last_error(text: str) -> str:
    lines = [
        line.strip()
        for line in text.splitlines()
        if ("Error" in line or "error:" in line) and "ChildFailed" not in line
    ]
    return lines[-1][:300] if lines else (text.strip().splitlines() or ["no output"])[-1][:300]


def _spawn(script: Path, exercise: Exercise, place: Path, on_cpu: bool) -> list[Finding]:
    """Run it with fresh interpreters, as spawn starts them."""
    run = _Real([sys.executable, script, "--nproc", 2, "--epochs", 1, "--snapshot", "run.pt"], place / "spawn")
    try:
        status = run.wait(LIMIT)
    finally:
        run.end()
    text = run.text()
    if status is None:
        return [Finding("hang", f"with the real mp.spawn it was not over after {LIMIT} s", detail=text[-3000:])]
    if status != 0:
        meaning = ""
        if "bootstrapping phase" in text:
            meaning = (
                '; what is at the top level runs in each new process again: call main() under if __name__ == "__main__"'
            )
        elif "pickle" in text or "Can't get attribute" in text or "Can't get local" in text:
            meaning = (
                "; spawn hands the function and its arguments over with pickle, "
                "which takes neither lambdas nor inner functions"
            )
        return [Finding("crash", f"with the real mp.spawn: {_last_error(text)}{meaning}", detail=text[-3000:])]
    if not read_log(place / "spawn" / "run.pt") and not (place / "spawn" / "run.pt").exists():
        return [
            Finding(
                "no-training",
                "with the real mp.spawn it ends well, and leaves neither log nor snapshot",
                detail=text[-3000:],
            )
        ]
    return []


# What a Jupyter session on a cluster hands on to the programs that are started in it: it is a Slurm job of one task.
SESSION = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "jupyter", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0",
           "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node1"}  # fmt: skip
# And what srun sets for the two tasks of a job on one node, beside their numbers.
TASKS = {**SESSION, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2",
         "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "0", "SLURM_NODELIST": "localhost"}  # fmt: skip


def _lightning(script: Path, exercise: Exercise, place: Path, on_cpu: bool) -> list[Finding]:
    """Start one process, and let Lightning start the other; where the exercise knows of them also in a job, and as srun does."""
    if "job-mistaken" not in exercise.kinds:
        return _trained_by_two(script, place / "alone", "started by itself", "wrong-group", [{}])
    port = {"SLURM_JOB_ID": str(os.getpid())}  # its last digits are where Lightning lets them meet
    tasks = [{**TASKS, **port, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    return _trained_by_two(
        script, place / "session", "inside a Slurm job of one task", "job-mistaken", [SESSION]
    ) or _trained_by_two(script, place / "srun", "as two tasks of srun", "wrong-group", tasks)


def _trained_by_two(script, folder, where, kind, environments) -> list[Finding]:
    """Start a process with each of these environments, and look whether it comes to a training by two."""
    command = [sys.executable, script, "--devices", 2, "--epochs", 1, "--batch-size", 32, "--snapshot", "run.ckpt"]
    started = [_Real(command, folder, OMP_NUM_THREADS="1", **environment) for environment in environments]
    try:
        statuses = [run.wait(LIMIT) for run in started]
    finally:
        for run in started:
            run.end()
    text = "\n".join(run.text() for run in started)
    if None in statuses:
        return [Finding("hang", f"{where} it was not over after {LIMIT} s", detail=text[-3000:])]
    if any(statuses):
        return [Finding(kind, f"{where} it fails: {_last_error(text)}", detail=text[-3000:])]
    processes = [entry["processes"] for entry in read_log(folder / "run.ckpt")]
    if text.count("training on ") > 1:
        return [Finding(kind, f"{where}, each trains for itself", detail=text[-3000:])]
    if processes != [2]:
        seen = f"{where}, with --devices 2, {processes[0] if processes else 'no'} process trains"
        return [Finding(kind, seen, detail=text[-3000:])]
    return []


def _command(script: Path, exercise: Exercise) -> list:
    """How the learner starts it: with the runner beside it, or without one as the solution's runner does."""
    runner = script.with_name(exercise.runner.name)
    if runner.exists() and ROOT in script.parents:  # a runner finds the workshop from where it lies
        return [runner]
    return [*torchrun(2, "--max-restarts=3"), script]


def _kills(script: Path, exercise: Exercise, place: Path, on_cpu: bool) -> list[Finding]:
    """kill -9 on a worker, and on torchrun: the run has to end with the weights that it would have had."""
    from workshop.check import launching

    command = _command(script, exercise)
    # What an uninterrupted run ends with: forked ranks compute the same, bit for bit, and are there at once.
    options = ["--epochs", "2", "--snapshot", "run.pt"]
    whole = place / "uninterrupted"
    whole.mkdir()
    run = launching.run_program(script, options, launch="torchrun", nproc=2, scratch=whole)
    if run.status != 0:
        return [Finding("crash", f"with all of the digits it ends with status {run.status}")]
    settings = {"OMP_NUM_THREADS": "1"} | ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if len(command) > 1 else {})
    with ThreadPoolExecutor(2) as both:  # most of the time goes into starting Python: on two cores two at a time
        kills = [
            both.submit(kill, [*command, *options], settings, place) for kill in (_worker_killed, _torchrun_killed)
        ]
        return [finding for kill in kills for finding in kill.result()]


def _same_weights(first: Path, second: Path) -> str:
    """Why two snapshots are not the same, or ""."""
    import torch

    if not second.exists():
        return "there is no snapshot"
    one, other = (torch.load(path, map_location="cpu", weights_only=False) for path in (first, second))
    one, other = (_tensors(snapshot) for snapshot in (one, other))
    if one.keys() != other.keys():
        return "the snapshot holds other things"
    worst = max(((one[name].double() - other[name].double()).abs().max().item() for name in one), default=0.0)
    return f"the weights differ by up to {worst:.1e}" if worst > 0 else ""


def _tensors(value, name="") -> dict:
    import torch

    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, dict):
        found = {}
        for key, item in value.items():
            found |= _tensors(item, f"{name}/{key}")
        return found
    return {}


def _worker_killed(command, settings, place) -> list[Finding]:
    run = _Real(command, place / "worker", **settings)
    try:
        problems = run.started()
        if problems:
            return problems
        run.workers()[1].kill()
        status = run.wait(LIMIT)
    finally:
        run.end()
    if status != 0:
        how = "it hangs" if status is None else f"it ends with status {status}"
        seen = f"after kill -9 on one worker {how}: nobody starts the processes again"
        return [Finding("not-restarted", seen, detail=run.text()[-3000:])]
    problem = _same_weights(place / "uninterrupted" / "run.pt", run.folder / "run.pt")
    if problem:
        return [Finding("resume-differs", f"after kill -9 on one worker and torchrun's restart {problem}")]
    return []


def _torchrun_killed(command, settings, place) -> list[Finding]:
    run = _Real(command, place / "torchrun", **settings)
    try:
        problems = run.started()
        if problems:
            return problems
        workers = run.workers()
        workers[0].parent().kill()  # torchrun, which need not be the runner itself
        run.wait(LIMIT)
        _, alive = psutil.wait_procs(workers, timeout=5)
        for worker in alive:
            worker.kill()
        if alive:
            count = len(alive)
            return [
                Finding(
                    "orphans",
                    f"5 s after kill -9 on torchrun {count} worker{'s' * (count > 1)} still train{'s' * (count == 1)}",
                )
            ]
    finally:
        run.end()
    again = _Real(command, place / "torchrun", **settings)
    try:
        status = again.wait(LIMIT)
    finally:
        again.end()
    if status != 0:
        seen = f"after kill -9 on torchrun the next start fails: {_last_error(again.text())}"
        return [Finding("resume-fails", seen, detail=again.text()[-3000:])]
    problem = _same_weights(place / "uninterrupted" / "run.pt", again.folder / "run.pt")
    return [Finding("resume-differs", f"after kill -9 on torchrun and a new start {problem}")] if problem else []


def _speed(script: Path, exercise: Exercise, place: Path, on_cpu: bool) -> list[Finding]:
    """The samples/s of the program and of the solution, in turns: until the best of each has come a second time, or nearly.

    Whatever else the machine does takes from a speed, and adds nothing to it.
    """
    if script == exercise.solution.resolve():
        return []
    turns = {"own": [], "solution": []}  # the best epoch of each
    hidden = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    settings = {} if on_cpu else {name: os.environ.get(name) for name in hidden}
    while not all(_settled(speeds) for speeds in turns.values()):
        for name, program in (("own", script), ("solution", exercise.solution)):
            place_of_run = place / f"{name}-{len(turns[name])}"
            run = _Real([sys.executable, program, "--epochs", 3, "--snapshot", "run.pt"], place_of_run, **settings)
            try:
                status = run.wait(LIMIT)
            finally:
                run.end()
            if status != 0:
                return [
                    Finding(
                        "crash",
                        f"it fails when it runs by itself: {_last_error(run.text())}",
                        detail=run.text()[-3000:],
                    )
                ]
            speeds = [entry["samples_per_second"] for entry in read_log(run.folder / "run.pt")]
            if not speeds:
                return [Finding("slower", "by itself it writes no log, so its samples/s are not known")]
            turns[name].append(max(speeds))
    best = {name: max(speeds) for name, speeds in turns.items()}
    if best["own"] * SLOWER < best["solution"]:
        ratio = best["solution"] / best["own"]
        return [
            Finding(
                "slower",
                f"{best['own']:,.0f} samples/s; the solution reaches {best['solution']:,.0f} here, {ratio:.2f} times as many",
            )
        ]
    return []


def _settled(speeds: list[float]) -> bool:
    """Whether the two best are close together, or there have been five turns."""
    best = sorted(speeds)[-2:]
    return len(speeds) >= 5 or (len(best) == 2 and best[0] > 0.9 * best[1])
