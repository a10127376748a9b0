"""What only a real launcher shows: spawn's fresh interpreters, torchrun's restarts, kill -9, the speed without a recorder."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from workshop.check.exercises import Exercise
from workshop.check.findings import Finding
from workshop.measure.launch import end_family
from workshop.measure.log import read_log
from workshop.repository import ROOT

LIMIT = 90  # seconds that a real run may take
SLOWER = 1.15  # times the solution's time


def real_part(exercise: Exercise) -> Callable[[Path, Exercise, Path], list[Finding]] | None:
    """The function that checks this exercise with a real launcher; None if there is nothing to see."""
    if exercise.launch == "spawn":
        return _spawn
    if "not-restarted" in exercise.kinds:
        return _kills
    if "slower" in exercise.kinds:
        return _speed
    return None


class _Real:
    """A program that runs for real, with its output in a file.

    Args:
        command: the program and its options.
        folder: where it runs; its output is kept there.
        settings: further environment variables.
    """

    def __init__(self, command: list, folder: Path, **settings: str):
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_"))
            and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        environment |= {"PYTHONPATH": str(ROOT), "WORKSHOP_PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "NPROC": "2"} | settings
        folder.mkdir(exist_ok=True)
        self.folder, self.output = folder, folder / "output.txt"
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, line: str) -> bool:
        """Wait until it has printed this, or has ended, or the time is over; say whether it has printed it."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            if line in self.text():
                return True
            if self.process.poll() is not None:
                return line in self.text()
            time.sleep(0.02)
        return False

    def wait(self) -> int | None:
        """Wait to its end; None if it took too long."""
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return None

    def workers(self) -> list[psutil.Process]:
        """The processes that torchrun started, by rank."""
        found = []
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                environment = child.environ()
                if "RANK" in environment and "TORCHELASTIC_RUN_ID" in environment:
                    found.append((int(environment["RANK"]), child))
        except psutil.Error:
            pass
        ranks = {}
        for rank, child in sorted(found, key=lambda pair: pair[1].pid):
            ranks.setdefault(rank, child)  # the oldest of a rank: its own children carry the same variables
        return [ranks[rank] for rank in sorted(ranks)]

    def end(self) -> None:
        end_family(self.process, grace=1)


def _last_error(text: str) -> str:
    lines = [
        line.strip()
        for line in text.splitlines()
        if ("Error" in line or "error:" in line) and "ChildFailed" not in line
    ]
    return lines[-1][:300] if lines else (text.strip().splitlines() or ["no output"])[-1][:300]


def _spawn(script: Path, exercise: Exercise, place: Path) -> list[Finding]:
    """Run it with fresh interpreters, as spawn starts them."""
    run = _Real([sys.executable, script, "--nproc", 2, "--epochs", 1, "--snapshot", "run.pt"], place / "spawn")
    try:
        status = run.wait()
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


def _command(script: Path, exercise: Exercise) -> list:
    """How the learner starts it: with the runner beside it, or without one as the solution's runner does."""
    runner = script.with_name(exercise.runner.name)
    if runner.exists() and ROOT in script.parents:  # a runner finds the workshop from where it lies
        return [runner]
    return [
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *("--nproc-per-node=2", "--max-restarts=3", script),
    ]


def _kills(script: Path, exercise: Exercise, place: Path) -> list[Finding]:
    """kill -9 on a worker, and on torchrun: the run has to end with the weights that it would have had."""
    from workshop.check import launching

    command = _command(script, exercise)
    if len(command) == 1 and not _uses_torchrun(command[0]):
        return [Finding("no-group", f"{command[0].name} does not start torchrun")]
    # What an uninterrupted run ends with: forked ranks compute the same, bit for bit, and are there at once.
    options = ["--epochs", "2", "--snapshot", "run.pt"]
    whole = place / "uninterrupted"
    whole.mkdir()
    run = launching.run_program(script, options, launch="torchrun", nproc=2, scratch=whole, small_data=False)
    if run.status != 0:
        return [Finding("crash", f"with all of the digits it ends with status {run.status}")]
    settings = {"OMP_NUM_THREADS": "1"} | ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if len(command) > 1 else {})
    with ThreadPoolExecutor(2) as both:  # most of the time goes into starting Python: on two cores two at a time
        kills = [
            both.submit(kill, [*command, *options], settings, place) for kill in (_worker_killed, _torchrun_killed)
        ]
        return [finding for kill in kills for finding in kill.result()]


def _uses_torchrun(runner) -> bool:
    text = Path(runner).read_text()
    return "torch.distributed.run" in text or "torchrun " in text


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
        if not run.wait_for("epoch 1/2") or len(workers := run.workers()) < 2:
            return [
                Finding(
                    "not-restarted",
                    f"no second process to kill after epoch 1: {_last_error(run.text())}",
                    detail=run.text()[-3000:],
                )
            ]
        workers[1].kill()
        status = run.wait()
    finally:
        run.end()
    if status != 0:
        how = "it hangs" if status is None else f"it ends with status {status}"
        return [
            Finding(
                "not-restarted",
                f"after kill -9 on one worker {how}: nobody starts the processes again",
                detail=run.text()[-3000:],
            )
        ]
    problem = _same_weights(place / "uninterrupted" / "run.pt", run.folder / "run.pt")
    if problem:
        return [Finding("resume-differs", f"after kill -9 on one worker and torchrun's restart {problem}")]
    return []


def _torchrun_killed(command, settings, place) -> list[Finding]:
    run = _Real(command, place / "torchrun", **settings)
    try:
        if not run.wait_for("epoch 1/2"):
            return []
        workers = run.workers()
        run.process.kill()
        run.process.wait()
        _, alive = psutil.wait_procs(workers, timeout=2)
        for worker in alive:
            worker.kill()
        if alive:
            count = len(alive)
            return [
                Finding(
                    "orphans",
                    f"2 s after kill -9 on torchrun {count} worker{'s' * (count > 1)} still train{'s' * (count == 1)}",
                )
            ]
    finally:
        run.end()
    again = _Real(command, place / "torchrun", **settings)
    try:
        status = again.wait()
    finally:
        again.end()
    if status != 0:
        return [
            Finding(
                "resume-fails",
                f"after kill -9 on torchrun the next start fails: {_last_error(again.text())}",
                detail=again.text()[-3000:],
            )
        ]
    problem = _same_weights(place / "uninterrupted" / "run.pt", again.folder / "run.pt")
    return [Finding("resume-differs", f"after kill -9 on torchrun and a new start {problem}")] if problem else []


def _speed(script: Path, exercise: Exercise, place: Path) -> list[Finding]:
    """The samples/s of the program and of the solution, in turns."""
    if script == exercise.solution.resolve():
        return []
    best = {"own": 0.0, "solution": 0.0}
    for turn in range(2):
        for name, program in (("own", script), ("solution", exercise.solution)):
            run = _Real([sys.executable, program, "--epochs", 3, "--snapshot", "run.pt"], place / f"{name}-{turn}")
            try:
                status = run.wait()
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
            best[name] = max([best[name], *speeds])
    if best["own"] * SLOWER < best["solution"]:
        ratio = best["solution"] / best["own"]
        return [
            Finding(
                "slower",
                f"{best['own']:,.0f} samples/s; the solution reaches {best['solution']:,.0f} here, {ratio:.2f} times as many",
            )
        ]
    return []
