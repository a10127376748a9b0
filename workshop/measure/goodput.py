"""Measure the goodput of a training that is killed again and again, for several checkpoint intervals, and compare it with Daly's
model: python -m workshop.measure.goodput

Goodput is the useful share of the time: the time of the training without kills and checkpoints, divided by the time that it
takes with them. The training is slurm-multinode/surviving/checkpoint_steps.py on two processes. A new start takes a fraction
of a second, because this program has imported PyTorch before and forks the processes, so a kill every two seconds is possible.
"""

import argparse
import json
import os
import random
import runpy
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from workshop.files import write_atomically
from workshop.measure.plots import plot_goodput
from workshop.measure.step_log import note_steps, read_steps
from workshop.plan.failures import daly, goodput, young
from workshop.repository import ROOT, open_folder
from workshop.run.environment import environment, free_port
from workshop.run.machine import machine

PROGRAM = ROOT / "slurm-multinode" / "surviving" / "checkpoint_steps.py"
RANKS, BATCH = 2, 4  # 4 samples per rank and step: 179 steps in each epoch of 1,437 samples
NEVER = 100_000  # steps between two checkpoints: none during the training
PATIENCE = 5  # times the time of an undisturbed run, plus a minute, after which a run is stopped


@dataclass(frozen=True)
class Trained:
    """A training, with its kills.

    Attributes:
        seconds: from its first start to its last step.
        kills: how often it was killed.
        steps: the number of its last step.
        training: seconds of the steps since the last start.
        starting: seconds from the last start to the beginning of its first step.
    """

    seconds: float
    kills: int
    steps: int
    training: float
    starting: float


def train(every: int, epochs: int, failures: Iterator[float], limit: float = 600) -> Trained:
    """Train in a new folder, kill all processes at random times and start them again, until the training is complete.

    Args:
        every: steps between two checkpoints.
        epochs: the length of the training.
        failures: for each start, the seconds until all processes are killed.
        limit: seconds after which the training is stopped.

    Raises:
        RuntimeError: the program fails again and again without being killed.
    """
    with tempfile.TemporaryDirectory(prefix="workshop-goodput-") as place:
        folder, begin, kills, broken = Path(place), time.time(), 0, 0
        while True:
            start, until = time.time(), next(failures)
            processes = [_fork(folder, rank, every, epochs, port) for port in [free_port()] for rank in range(RANKS)]
            try:
                statuses = _wait(processes, min(start + until, begin + limit))
            finally:
                _kill(processes)
            if statuses == [0] * RANKS or time.time() > begin + limit:
                break
            if time.time() < start + until:  # one of the processes failed, and nobody killed it
                broken += 1
                if broken > 5:
                    raise RuntimeError(f"{PROGRAM.name} fails:\n{(folder / 'output.txt').read_text()[-3000:]}")
            kills += 1
        steps = read_steps(folder / "steps.txt")
    if not steps:
        return Trained(time.time() - begin, kills, 0, 0.0, 0.0)
    own = [step.time for step in steps if step.process == steps[-1].process]
    step = statistics.median(after - before for before, after in pairwise(own)) if len(own) > 1 else 0.0
    seconds = steps[-1].time - begin
    return Trained(seconds, kills, steps[-1].number, own[-1] - own[0] + step, own[0] - step - start)


def _fork(folder: Path, rank: int, every: int, epochs: int, port: int) -> int:
    """Fork a process that runs the program as one rank, and return its process id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(environment(gpus=False, **ranks))
        sys.argv = [
            str(PROGRAM),
            f"--epochs={epochs}",
            f"--batch-size={BATCH}",
            f"--save-every={every}",
            "--folder=run",
        ]
        sys.path.insert(0, str(PROGRAM.parent))
        note_steps(folder / "steps.txt")
        runpy.run_path(str(PROGRAM), run_name="__main__")
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _wait(processes: list[int], until: float) -> list[int | None]:
    """Wait until all processes have ended, or one has failed, or a time; return their statuses, None for those that still run."""
    statuses: dict[int, int | None] = dict.fromkeys(processes)
    while time.time() < until:
        for process in [process for process, status in statuses.items() if status is None]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                statuses[process] = os.waitstatus_to_exitcode(status)
                processes[processes.index(process)] = 0  # nobody may kill it later: the system reuses process ids
        if None not in statuses.values() or any(statuses.values()):
            break
        time.sleep(0.002)
    return list(statuses.values())


def _kill(processes: list[int]) -> None:
    for process in filter(None, processes):
        os.kill(process, signal.SIGKILL)
    for process in filter(None, processes):
        os.waitpid(process, 0)


def failures(between: float, seed: int) -> Iterator[float]:
    """Yield random times of failures: independent of each other, with a mean of ``between`` seconds."""
    numbers = random.Random(seed)
    while True:
        yield numbers.expovariate(1 / between)


def undisturbed(every: int, epochs: int) -> Trained:
    """Train without kills."""
    return train(every, epochs, iter([1e9]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0].replace("\n", " "))
    parser.add_argument(
        "--every", type=int, nargs="+", default=[1, 5, 10, 20, 50, 100], help="steps between checkpoints"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs for each of them, with different times of the kills")
    parser.add_argument(
        "--between", type=float, help="mean seconds between two kills; default: 2, or 4 times a restart"
    )
    parser.add_argument("--epochs", type=int, default=2, help="length of the training, 179 steps each")
    parser.add_argument("--output", default=str(ROOT / "results"), help="folder for goodput.json and goodput.png")
    parser.add_argument("--name", default="goodput-2-cores", help="their name")
    args = parser.parse_args()
    if min(*args.every, args.seeds, args.epochs) < 1 or (args.between is not None and args.between <= 0):
        parser.error("all numbers must be above 0")
    folder = open_folder(args.output)
    _import_before_forking()
    console = Console(highlight=False)
    measured = costs(console, args.epochs)
    between = args.between or max(2.0, 4 * measured.restart)
    console.print(f"all processes are killed every {between:.1f} s on average")
    runs = {
        every: [_one(every, args.epochs, seed, measured, between, console) for seed in range(args.seeds)]
        for every in args.every
    }
    every = " ".join(map(str, args.every))
    command = f"python -P -m workshop.measure.goodput --every {every} --seeds {args.seeds} --epochs {args.epochs}"
    result = {"machine": machine(), "command": command, **report(console, measured, runs, between)}
    write_atomically(folder / f"{args.name}.json", json.dumps(result, indent=1) + "\n")
    plot_goodput(folder / f"{args.name}.png", result)


@dataclass(frozen=True)
class Costs:
    """What the model of the goodput needs, measured without random kills.

    Attributes:
        training: seconds of the training without checkpoints.
        steps: its number of steps.
        checkpoint: seconds by which a checkpoint makes the training longer.
        restart: seconds from a kill to the first step after it.
    """

    training: float
    steps: int
    checkpoint: float
    restart: float

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.training / self.steps


def costs(console: Console, epochs: int, every: int = 10) -> Costs:
    """Measure three trainings: without checkpoints, with checkpoints, and with checkpoints and one kill in the middle."""
    plain, saving = undisturbed(NEVER, epochs), undisturbed(every, epochs)
    killed = train(every, epochs, iter([saving.starting + saving.training / 2, 1e9]))
    checkpoint = max(1e-4, (saving.training - plain.training) / (saving.steps // every))
    found = Costs(plain.training, plain.steps, checkpoint, killed.starting)
    console.print(
        f"{found.steps} steps of {1e3 * found.step:.1f} ms; a checkpoint takes {1e3 * found.checkpoint:.0f} ms, "
        f"a restart {found.restart:.2f} s"
    )
    return found


def _one(every: int, epochs: int, seed: int, measured: Costs, between: float, console: Console) -> dict[str, float]:
    """Run a training with random kills, and return its goodput and its kills."""
    run = train(every, epochs, failures(between, seed), limit=PATIENCE * measured.training + 60)
    share = run.steps * measured.step / run.seconds
    console.print(f"a checkpoint every {every:3} steps, seed {seed}: {run.kills:2} kills, goodput {share:.0%}")
    return {
        "seed": seed,
        "kills": run.kills,
        "seconds": round(run.seconds, 3),
        "steps": run.steps,
        "goodput": round(share, 4),
    }


def report(
    console: Console, measured: Costs, runs: dict[int, list[dict[str, float]]], between: float
) -> dict[str, object]:
    """Print measured and predicted goodput with the error of the prediction, and return all of it."""
    table = Table("checkpoint every", "goodput", "lowest - highest", "Daly's model", "error")
    rows, model = {}, {"checkpoint": measured.checkpoint, "restart": measured.restart, "between": between}
    for every, each in runs.items():
        shares = [run["goodput"] for run in each]
        predicted = goodput(every * measured.step, **model)
        error = predicted / statistics.mean(shares) - 1
        rows[every] = {"goodput": statistics.mean(shares), "predicted": predicted, "error": error, "runs": each}
        numbers = (
            f"{statistics.mean(shares):.0%}",
            f"{min(shares):.0%} - {max(shares):.0%}",
            f"{predicted:.0%}",
            f"{error:+.0%}",
        )
        table.add_row(f"{every} steps", *numbers)
    console.print(table)
    best = {rule.__name__: rule(measured.checkpoint, between) / measured.step for rule in (young, daly)}
    errors = [abs(row["error"]) for row in rows.values()]
    console.print(f"best interval: {best['young']:.0f} steps (Young), {best['daly']:.0f} steps (Daly)")
    console.print(f"error of the model: median {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    return {
        "between": between,
        "costs": asdict(measured) | {"step": measured.step},
        "best": best,
        "error": {"median": statistics.median(errors), "largest": max(errors)},
        "every": rows,
    }


def _import_before_forking() -> None:
    """Import what the program imports. No thread may run when a process forks."""
    import torch
    import torch.distributed.checkpoint.state_dict
    import torchvision  # noqa: F401

    import workshop.data
    import workshop.training.models  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
