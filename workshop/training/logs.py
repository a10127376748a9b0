"""Write the log of a training run: one line per epoch on standard output, and the same as JSON beside the checkpoint."""

import json
import os
import time
from pathlib import Path

from workshop.files import write_atomically


def log_path(checkpoint: str | os.PathLike) -> Path:
    """Return the path of the log that belongs to a checkpoint: ``runs/name.pt`` has ``runs/name.jsonl``."""
    return Path(checkpoint).with_suffix(".jsonl")


def read_log(checkpoint: str | os.PathLike) -> list[dict]:
    """Return the epochs of a run in order, as ``EpochLog.write`` wrote them, without a line that a kill has cut short."""
    path = log_path(checkpoint)
    epochs = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            epochs.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return epochs


class EpochLog:
    """Print one line per epoch and write it, with the loss of every step, to ``log_path(checkpoint)`` as one line of JSON.

    Nothing is written before the first epoch has ended. A run that resumes from a checkpoint repeats the epochs after it, so
    the log drops their earlier lines.

    Args:
        checkpoint: the path of the checkpoint of the run.
        epochs: the number of epochs of the run.
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
            metrics: further metrics of the test set, by name.
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


class SampleLog:
    """A log of the samples of each step, with a file for each process that writes it.

    Each line also contains the rank, the number of ranks, and where this start of the program began (epoch and step), so that a
    reader can follow the steps over several starts with different numbers of ranks.

    Args:
        folder: the folder of the files; None: write nothing.
        epoch, step: where this start began, from 0.
        device: the device of this rank.
    """

    def __init__(self, folder: str | os.PathLike | None, epoch: int, step: int, device):
        self.path = None
        if folder is None:
            return
        import torch
        import torch.distributed as dist

        began = torch.tensor([time.time_ns()], device=device)
        dist.broadcast(began, src=0)  # the time of rank 0 identifies this start on all ranks
        os.makedirs(folder, exist_ok=True)
        self.path = Path(folder, f"{began.item()}-{dist.get_rank()}.jsonl")
        self.common = {
            "start": began.item(),
            "from": [epoch, step],
            "rank": dist.get_rank(),
            "ranks": dist.get_world_size(),
        }

    def write(self, epoch: int, step: int, **facts) -> None:
        """Append a line about a step; ``facts`` must be values that JSON has."""
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps({**self.common, "epoch": epoch, "step": step, **facts}) + "\n")
