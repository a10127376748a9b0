"""What the check observes of the runs of a sharded language model, beside their events."""

from dataclasses import dataclass

from workshop.check.evidence.run import Run


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of ``torch.distributed.checkpoint`` that a run has left.

    Attributes:
        complete: whether there is one; its metadata are written last.
        names: the names in its metadata.
        writers: how many processes wrote files of it.
    """

    complete: bool
    names: tuple[str, ...] = ()
    writers: int = 0

    def has(self, part: str) -> bool:
        """Whether some name contains this."""
        return any(part in name for name in self.names)


@dataclass(frozen=True)
class Restarted:
    """A run that was killed after a checkpoint, and runs that were started again from it.

    Attributes:
        first: the run that was killed.
        again: with the same number of processes.
        others: with other numbers of processes and the same global batches; empty where there is nothing to resume from.
    """

    first: Run
    again: Run
    others: tuple[Run, ...] = ()


@dataclass(frozen=True)
class Exported:
    """What the program made of a checkpoint that is to turn it into a model for plain transformers.

    Attributes:
        program: the name of its file.
        run: its run; None: there is no such file.
        files: the names in the folder that it was to write; None: there is no such folder.
        loss: the validation loss of the exported model with plain transformers, in nats; None: it was not loaded.
        error: what transformers says instead of loading it, or "".
    """

    program: str
    run: Run | None = None
    files: tuple[str, ...] | None = None
    loss: float | None = None
    error: str = ""


@dataclass(frozen=True)
class OptionRuns:
    """Short runs, each with one option.

    Attributes:
        plain: without any of them.
        checkpointing: with ``--activation-checkpointing``.
        keeping: with ``--keep-gathered``.
        offloading: with ``--offload``.
        compiling: with ``--compile``.
        accumulating: with ``--accumulate 2`` and half the batch.
    """

    plain: Run
    checkpointing: Run
    keeping: Run
    offloading: Run
    compiling: Run
    accumulating: Run
