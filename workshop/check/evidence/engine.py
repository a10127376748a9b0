"""What the check reads from the files of a program that trains with DeepSpeed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCheckpoint:
    """The checkpoint folder of the engine at the end of the run."""

    named: bool  # there is a file "latest", which names the checkpoint once it is complete
    parts: int  # number of processes whose part of the optimizer state is there
    files: tuple[str, ...] | None  # the names in the folder; None: there is no such folder


@dataclass(frozen=True)
class PlainWeights:
    """The file that the program wrote for ``--export``."""

    found: bool
    error: str = ""  # why the plain model cannot load it
    different: tuple[str, ...] = ()  # parameters that differ from those of the same training without the engine
