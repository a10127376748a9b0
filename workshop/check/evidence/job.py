"""What a job script requests from Slurm, and what its job did."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workshop.slurm.shape import Shape

PROGRAM = "multigpu_torchrun.py"  # the training program that the job scripts start


@dataclass(frozen=True)
class Request:
    """How Slurm interprets the directives of a script."""

    asked: "Shape | None"  # None: Slurm rejects the script
    wanted: "Shape | None" = None  # what the exercise requires; None: any
    options: dict[str, str] = field(default_factory=dict)  # as sbatch read them: {"signal": "B:USR1@60"}
    refused: str = ""  # why Slurm rejects it; "": it does not
    alone: bool = False  # only the controller of Slurm was asked, because no job can run on this machine


@dataclass(frozen=True)
class Start:
    """A process of the training program, as it started."""

    host: str  # the node
    environment: dict[str, str]  # the launcher variables that the check reads
    launcher: tuple[str, ...]  # the command line of the process that started it
    step: str  # what Slurm says about its job step; "": it is in none


@dataclass
class Job:
    """A job and what is known about it; starts and epochs are in chronological order."""

    number: str = ""  # its job id; "": it was not submitted
    options: dict[str, str] = field(default_factory=dict)  # as sbatch read them from the script and the command line
    shape: "Shape | None" = None  # of the job that the check submitted; None: it does not matter
    refused: str = ""  # why sbatch rejected it; "": it did not
    state: str = "PENDING"  # in the terms of Slurm
    nodes: list[str] = field(default_factory=list)  # of its last start
    restarts: int = 0  # how often Slurm restarted it
    output: str = ""
    starts: list[Start] = field(default_factory=list)
    epochs_asked: int = 0
    epochs: list[int] = field(default_factory=list)  # those that it trained, counted from 0
    launchers: dict[str, int] | None = None  # by node: the torchruns there when it stalled; None: it did not stall
    commands: list[list[str]] = field(default_factory=list)  # the command lines of these torchruns
    fault: str = ""  # what the check did: the node that it killed or the signal that it sent; "": nothing
    lasted: float = 0.0  # seconds from the failure that the check caused to the end of the job
    before: int = 0  # number of epochs that it had trained when Slurm restarted it
    processes: int = 0  # according to the log of its training; 0: there is no log

    @property
    def known_shape(self) -> "Shape":
        """The shape of the job that the check submitted."""
        if self.shape is None:
            raise ValueError(f"the shape of job {self.number} is not known")
        return self.shape

    @property
    def last_error(self) -> str:
        """The line of the output that most likely names the error."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"error|not found|cannot|No such", line, re.IGNORECASE)]
        return (telling or lines or ["it printed nothing"])[-1][:300]
