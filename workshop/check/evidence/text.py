"""What the check observes of the runs of a sharded language model, beside their events."""

from dataclasses import dataclass

from workshop.check.evidence.run import Run


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of ``torch.distributed.checkpoint`` that a run has left."""

    complete: bool  # its metadata are there, which are written last
    names: tuple[str, ...] = ()  # in its metadata
    writers: int = 0  # how many processes wrote files of it

    def has(self, part: str) -> bool:
        """Whether some name contains this."""
        return any(part in name for name in self.names)


@dataclass(frozen=True)
class Restarted:
    """A run that was killed after a checkpoint, and runs that were started again from it."""

    first: Run
    again: Run  # with the same number of processes
    others: tuple[Run, ...] = ()  # with other numbers of processes and the same global batches


@dataclass(frozen=True)
class Exported:
    """What became of a checkpoint that a program is to turn into a model for plain transformers."""

    program: str  # the name of its file
    run: Run | None = None  # None: there is no such file
    files: tuple[str, ...] | None = None  # the names in the folder that it was to write; None: there is no such folder
    loss: float | None = None  # on the validation set with plain transformers, in nats; None: it was not loaded
    error: str = ""  # what transformers says instead of loading it


@dataclass(frozen=True)
class OptionRuns:
    """Short runs, each with one option."""

    plain: Run  # without any of them
    checkpointing: Run  # --activation-checkpointing
    keeping: Run  # --keep-gathered
    offloading: Run  # --offload
    compiling: Run  # --compile
    accumulating: Run  # --accumulate 2, with half the batch
