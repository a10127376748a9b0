"""Kill a training in four ways of surviving, and measure what it loses: python -m workshop.measure.surviving

Each answer trains the same model with the same global batch of 24 samples on two processes. When the training reaches a random
step of its second epoch, one of the processes is killed with SIGKILL.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from workshop.files import write_atomically
from workshop.measure.step_log import Step, read_steps
from workshop.repository import ROOT
from workshop.run.environment import environment, torchrun
from workshop.run.machine import machine
from workshop.run.processes import Background

STAGE = ROOT / "slurm-multinode"
EPOCHS, EPOCH = 4, 59  # 1,437 samples, in steps of 24
LIMIT = 240  # seconds for a run


@dataclass(frozen=True)
class Loss:
    """What a kill cost.

    Attributes:
        killed: the last step before the kill.
        steps: steps that the training had to repeat.
        seconds: from the kill to the next step that had not been done before, without the time of this step itself.
    """

    killed: int
    steps: int
    seconds: float


class Run:
    """A training in a folder of its own, whose steps a file records."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, folder / "steps.txt"
        self.programs: list[Background] = []

    def start(self, *command: object) -> Background:
        """Start a program of this training."""
        # With a shared store, restarted processes could read the addresses of the killed ones.
        changes = {"OMP_NUM_THREADS": 1, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
        program = Background(command, self.folder, environment(gpus=False, **changes))
        self.programs.append(program)
        return program

    def steps(self) -> list[Step]:
        """Return the steps so far."""
        return read_steps(self.file)

    def logged(self, program: str, *options: object) -> list[object]:
        """Return the words that torchrun needs to start a program of the stage whose steps are recorded."""
        return ["-m", "workshop.measure.step_log", self.file, STAGE / program, f"--epochs={EPOCHS}", *options]

    def wait_for(self, step: int) -> None:
        """Wait until the training has done a step."""
        end = time.monotonic() + LIMIT
        while not any(each.number >= step for each in self.steps()):
            ended = all(program.process.poll() is not None for program in self.programs)
            if time.monotonic() > end or ended:
                sys.exit(f"the training did not reach step {step}:\n" + "\n".join(self.outputs())[-3000:])
            time.sleep(0.01)

    def outputs(self) -> list[str]:
        """Return what its programs have printed."""
        return [program.text() for program in self.programs]

    def end(self) -> None:
        """End all its processes."""
        for program in self.programs:
            program.end()


def kill(process: psutil.Process) -> float:
    """Kill a process with SIGKILL and return the time."""
    now = time.time()
    process.kill()
    return now


def restart_from_epoch(run: Run, step: int) -> float:
    """Torchrun starts all workers again, and they resume from the last epoch."""
    options = "--batch-size=12", "--checkpoint=run.pt"
    program = run.start(*torchrun(2, "--max-restarts=1"), *run.logged("multigpu_torchrun.py", *options))
    run.wait_for(step)
    return kill(program.workers()[1])


def start_job_again(run: Run, step: int) -> float:
    """The job ends, and a scheduler that needs no time starts it again; it resumes from the last epoch."""
    options = "--batch-size=12", "--checkpoint=run.pt"
    command = [*torchrun(2), *run.logged("multigpu_torchrun.py", *options)]
    program = run.start(*command)
    run.wait_for(step)
    now = kill(program.workers()[1])
    program.process.wait(LIMIT)
    run.start(*command)
    return now


def checkpoint_steps(run: Run, step: int) -> float:
    """Torchrun starts all workers again, and they resume from the last checkpoint, which is at most four steps old."""
    options = "--batch-size=12", "--save-every=4", "--folder=run"
    command = run.logged("surviving/checkpoint_steps.py", *options)
    program = run.start(*torchrun(2, "--max-restarts=1"), *command)
    run.wait_for(step)
    return kill(program.workers()[1])


def elastic(run: Run, step: int) -> float:
    """One of two nodes dies with its torchrun; the other continues alone, from the last checkpoint."""
    store = run.start(sys.executable, STAGE / "surviving/rendezvous_store.py", "store")
    while not (run.folder / "store").exists():
        time.sleep(0.05)
    conf = "--rdzv-conf=is_host=0,last_call_timeout=2"
    meeting = "--rdzv-backend=c10d", f"--rdzv-endpoint={(run.folder / 'store').read_text().strip()}", conf
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", *meeting]
    command += ["--rdzv-id=kill", "--max-restarts=5", "--local-addr=127.0.0.1"]
    command += run.logged("surviving/elastic.py", "--batch-size=24", "--save-every=4", "--checkpoint=run.pt")
    nodes = [run.start(*command) for _ in range(2)]
    run.wait_for(step)
    assert store.process.poll() is None
    worker = nodes[1].workers()[0]
    now = kill(psutil.Process(nodes[1].process.pid))
    kill(worker)
    return now


def tolerate(run: Run, step: int) -> float:
    """The other replica repeats at most one step; a new replica joins later."""
    log = run.folder / "log.jsonl"
    program = STAGE / "surviving/tolerate.py"
    run.start(sys.executable, program, "--replicas=2", f"--steps={EPOCHS * EPOCH}", f"--log={log}")
    run.steps = lambda: [Step(row["time"], 0, row["step"]) for row in map(json.loads, _lines(log))]  # type: ignore[method-assign]
    run.wait_for(step)
    return kill(psutil.Process(run.programs[0].process.pid).children()[1])


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []


ANSWERS: dict[str, Callable[[Run, int], float]] = {
    "restart from the epoch": restart_from_epoch,
    "start the job again": start_job_again,
    "checkpoint every 4 steps": checkpoint_steps,
    "elastic, checkpoint every 4 steps": elastic,
    "per-step tolerance": tolerate,
}


def measure(answer: str, step: int) -> Loss:
    """Run a training with one of the answers, kill it when it has done ``step`` steps, and return the loss."""
    with tempfile.TemporaryDirectory(prefix="workshop-surviving-") as place:
        run = Run(Path(place))
        try:
            killed_at = ANSWERS[answer](run, step)
            old = {each.process for each in run.steps() if each.time <= killed_at}
            killed = max(each.number for each in run.steps() if each.process in old and each.time <= killed_at)
            run.wait_for(killed + 10)
            steps = run.steps()
            tolerant = answer == "per-step tolerance"  # its processes do not restart
            if not tolerant:  # the last step may have ended while the signal was on its way
                killed = max(each.number for each in steps if each.process in old)
            after = [each for each in steps if each.time > killed_at and (tolerant or each.process not in old)]
            again = next(each.time for each in after if each.number == killed + 1)
            repeated = "".join(run.outputs()).count("is not valid") if tolerant else killed + 1 - after[0].number
            return Loss(killed, repeated, round(again - killed_at - seconds_per_step(steps, killed_at), 3))
        finally:
            run.end()


def seconds_per_step(steps: list[Step], until: float) -> float:
    """Return the median time of the steps before a kill."""
    first = {}
    for step in steps:
        if step.time <= until:
            first.setdefault(step.number, step.time)
    times = [first[number] for number in sorted(first)]
    return statistics.median(after - before for before, after in pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--kills", type=int, default=3, help="kills per answer")
    parser.add_argument("--only", default="", metavar="WORD", help="only the answers whose name contains this word")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "surviving-2-cores.json")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    console, losses = Console(), {}
    for answer in (name for name in ANSWERS if args.only in name):
        losses[answer] = []
        for seed in range(args.kills):
            losses[answer].append(measure(answer, random.Random(seed).randrange(EPOCH + 1, 2 * EPOCH)))
            console.print(f"{answer}: {losses[answer][-1]}", highlight=False)
    table = Table(
        "answer", "steps lost", "seconds lost", title="one process killed: median of the kills (lowest - highest)"
    )
    for answer, each in losses.items():
        table.add_row(
            answer, spread([loss.steps for loss in each], ".0f"), spread([loss.seconds for loss in each], ".1f")
        )
    console.print(table)
    result = {
        "machine": machine(),
        "command": f"python -P -m workshop.measure.surviving --kills {args.kills}",
        "steps_per_epoch": EPOCH,
        "median": {
            answer: {what: statistics.median(getattr(loss, what) for loss in each) for what in ("steps", "seconds")}
            for answer, each in losses.items()
        },
        "kills": {answer: [asdict(loss) for loss in each] for answer, each in losses.items()},
    }
    write_atomically(args.output, json.dumps(result, indent=1) + "\n")


def spread(values: list[float], form: str) -> str:
    """Return the median of values with the lowest and the highest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


if __name__ == "__main__":
    main()
