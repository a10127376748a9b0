"""The log of a training run: a line an epoch on standard output, and the same as JSON beside the checkpoint."""

import json
import os
from pathlib import Path

from workshop.files import write_atomically


def log_path(checkpoint: str | os.PathLike) -> Path:
    """The log that belongs to a checkpoint: ``runs/name.pt`` has ``runs/name.jsonl``."""
    return Path(checkpoint).with_suffix(".jsonl")


def read_log(checkpoint: str | os.PathLike) -> list[dict]:
    """The epochs of a run in order, as ``EpochLog.write`` put them; a line cut short by a kill is left out."""
    path = log_path(checkpoint)
    epochs = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            epochs.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return epochs


class EpochLog:
    """Prints one line an epoch and writes it, with the loss of every step, to ``log_path(checkpoint)`` as one line of JSON.

    Nothing is written before the first epoch has ended. A run that carries on from a checkpoint trains the epochs after it again:
    their lines from before are dropped.

    Args:
        checkpoint: the path of the run's checkpoint.
        epochs: how many epochs the run will have.
        device: the device (type) that it trains on.
        processes: the number of processes.
    """

    def __init__(self, checkpoint: str | os.PathLike, epochs: int, device, processes: int):
        self.checkpoint, self.epochs = checkpoint, epochs
        self.run = {"device": getattr(device, "type", str(device)), "processes": processes}
        self.started = False

    def write(
        self, epoch: int, losses: list[float], accuracy: float | None, samples_per_second: float, **metrics: float
    ) -> None:
        """Report an epoch.

        Args:
            epoch: its number, counted from 0.
            losses: the loss of each step: the mean over the global batch.
            accuracy: over the whole test set, between 0 and 1; None: not measured.
            samples_per_second: of all processes together, while training.
            metrics: further figures of the test set, by name.
        """
        measured = "not measured" if accuracy is None else f"{accuracy:.2%}"
        print(
            f"epoch {epoch + 1}/{self.epochs} | loss {sum(losses) / len(losses):.4f} | accuracy {measured} | "
            + "".join(f"{name.replace('_', ' ')} {value:.4f} | " for name, value in metrics.items())
            + f"{samples_per_second:,.0f} samples/s",
            flush=True,
        )
        entry = {
            "epoch": epoch,
            "accuracy": accuracy,
            **metrics,
            "samples_per_second": samples_per_second,
            **self.run,
            "losses": losses,
        }
        path = log_path(self.checkpoint)
        if not self.started:
            self.started = True
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [json.dumps(earlier) + "\n" for earlier in read_log(self.checkpoint) if earlier["epoch"] < epoch]
            write_atomically(path, "".join(kept))
        with open(path, "a") as file:
            file.write(json.dumps(entry) + "\n")
