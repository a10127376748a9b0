"""What the check observes of the files that a program with DeepSpeed's engine leaves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCheckpoint:
    """The folder that the engine was to save to, when the run has ended.

    Attributes:
        named: whether there is a file "latest", which names the checkpoint once it is complete.
        parts: how many processes' parts of the optimizer's state are there.
        files: the names in the folder; None: there is no such folder.
    """

    named: bool
    parts: int
    files: tuple[str, ...] | None


@dataclass(frozen=True)
class PlainWeights:
    """The file that ``--export`` named.

    Attributes:
        found: whether it is there.
        error: why the plain model cannot load it, or "".
        different: the names of the parameters that are not those of the same training without the engine.
    """

    found: bool
    error: str = ""
    different: tuple[str, ...] = ()
