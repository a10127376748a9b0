"""Compare predictions with trainings on this machine: a tiny model, 1 to 4 processes, DDP and FSDP."""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.plan.cards import HERE, find_card
from workshop.plan.layout import Layout
from workshop.plan.sizes import find_model
from workshop.plan.time import fitted, predict
from workshop.run.environment import environment, torchrun
from workshop.run.failures import first_failure
from workshop.run.machine import cores, gpus, machine
from workshop.run.processes import launch

MODEL = "tiny-codellama"
BATCH, TOKENS = 8, 256  # sequences of each process, and tokens of a sequence
WAYS = {"ddp": 0, "fsdp": 3}


def compare_here(steps: int = 5) -> list[dict]:
    """Train on this machine and return measured and predicted tokens/s of each process; []: it has not been measured as a card.

    Args:
        steps: steps of each training that are timed.

    Raises:
        UserError: a training failed.
    """
    if not HERE.is_file():
        return []
    card, model, found = find_card("here"), find_model(MODEL), []
    for count in (1, 2, 4):
        if count > max(gpus(), cores()):
            break
        for way, measured in _measured(count, steps).items():
            layout = Layout(dp=count, zero=WAYS[way], mbs=BATCH, kernels="eager", fused_loss=False)
            times = predict(model, layout, card, TOKENS, fitted())
            predicted = BATCH * TOKENS / times.step
            found.append(
                {
                    "strategy": way,
                    "processes": count,
                    "measured": round(measured, 1),
                    "predicted": round(predicted, 1),
                    "error": round(predicted / measured - 1, 4),
                }
            )
    return found


def write_here(rows: list[dict], path: Path) -> None:
    """Write the result of ``compare_here`` with the machine, and what ``bench --card`` has measured of it."""
    card = asdict(find_card("here"))
    options = {"model": MODEL, "sequences_per_process": BATCH, "sequence_length": TOKENS}
    document = {"machine": machine(), "command": "./workshop.sh bench --card && ./workshop.sh plan --validate"}
    write_atomically(path, json.dumps(document | options | {"card": card, "rows": rows}, indent=1, default=str) + "\n")


def _measured(count: int, steps: int) -> dict[str, float]:
    """Return the tokens per second of each process, by strategy."""
    options = ["--model", MODEL, "--steps", str(steps), "--sequence-length", str(TOKENS)]
    options += ["--batch-sizes", str(BATCH), "--ways", *WAYS]
    rows = train(count, options)
    return {row["way"]: row["tokens_per_second"] / count for row in rows if row["tokens_per_second"]}


def train(count: int, options: list[str]) -> list[dict]:
    """Train with ``workshop.measure.language_model`` on this machine, and return the rows of its result.

    Args:
        count: the number of processes.
        options: its options, without --output.

    Raises:
        UserError: the training failed.
    """
    with tempfile.TemporaryDirectory(prefix="workshop-train-") as scratch:
        place = Path(scratch)
        threads = os.environ.get("OMP_NUM_THREADS", 1)
        variables = environment(OMP_NUM_THREADS=threads, PET_LOG_DIR=place / "torchrun")
        command = [*torchrun(count), "-m", "workshop.measure.language_model", "--output=.", *options]
        outcome = launch(command, variables, place, lambda line: None)
        if outcome.status != 0:
            raise UserError(f"measuring failed: {first_failure(outcome, place / 'torchrun')}")
        return json.loads((place / "language_model.json").read_text())["rows"]
