"""What the check observes of the files that a program with DeepSpeed's engine leaves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCheckpoint:
    """The folder that the engine was to save to, when the run has ended."""

    named: bool  # there is a file "latest", which names the checkpoint once it is complete
    parts: int  # how many processes' parts of the optimizer's state are there
    files: tuple[str, ...] | None  # the names in the folder; None: there is no such folder


@dataclass(frozen=True)
class PlainWeights:
    """The file that ``--export`` named."""

    found: bool
    error: str = ""  # why the plain model cannot load it
    different: tuple[str, ...] = ()  # the parameters that are not those of the same training without the engine
