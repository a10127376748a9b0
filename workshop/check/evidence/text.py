"""What the check reads about runs of a sharded language model, in addition to their events."""

from dataclasses import dataclass

from workshop.check.evidence.run import Run


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a run saved with ``torch.distributed.checkpoint``."""

    complete: bool  # it has metadata, which are written last
    names: tuple[str, ...] = ()  # of the tensors, from its metadata
    writers: int = 0  # number of processes that wrote files of it

    def has(self, part: str) -> bool:
        """Whether any name contains ``part``."""
        return any(part in name for name in self.names)


@dataclass(frozen=True)
class Restarted:
    """A run that was killed after a checkpoint, and runs that resume from it."""

    first: Run
    again: Run  # with the same number of processes
    others: tuple[Run, ...] = ()  # with different numbers of processes and the same global batches


@dataclass(frozen=True)
class Exported:
    """The result of a program that exports a checkpoint for transformers."""

    program: str  # the name of its file
    run: Run | None = None  # None: there is no such file
    files: tuple[str, ...] | None = None  # the names in the export folder; None: there is no such folder
    loss: float | None = None  # on the validation set with transformers, in nats; None: not loaded
    error: str = ""  # why transformers cannot load it


@dataclass(frozen=True)
class OptionRuns:
    """Short runs, each with one option."""

    plain: Run  # without options
    checkpointing: Run  # --activation-checkpointing
    keeping: Run  # --keep-gathered
    offloading: Run  # --offload
    compiling: Run  # --compile
    accumulating: Run  # --accumulate 2, with half the batch
