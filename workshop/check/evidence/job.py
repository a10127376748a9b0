"""What a job script asks Slurm for, and what a job of it did."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workshop.slurm.shape import Shape

PROGRAM = "multigpu_torchrun.py"  # the training program that the job scripts start


@dataclass(frozen=True)
class Request:
    """What Slurm understands of the directives of a script."""

    asked: "Shape | None"  # None: Slurm rejects the script
    wanted: "Shape | None" = None  # what it should ask for; None: any
    options: dict[str, str] = field(default_factory=dict)  # that sbatch took from it: {"signal": "B:USR1@60"}
    refused: str = ""  # why Slurm rejects it; "": it does not
    alone: bool = False  # only Slurm's controller was asked, because no job can run on this machine


@dataclass(frozen=True)
class Start:
    """A process of the training program, as it started."""

    host: str  # the node
    environment: dict[str, str]  # of the variables that a launcher may set, those that the check reads
    launcher: tuple[str, ...]  # the command line of the process that started it
    step: str  # what Slurm says of its job step; "": it is in none


@dataclass
class Job:
    """A job and what is known about it; starts and epochs are in the order of time."""

    number: str = ""  # its job id; "": it was not submitted
    options: dict[str, str] = field(default_factory=dict)  # those that sbatch took from the script and the command line
    shape: "Shape | None" = None  # that the check ran it in; None: it does not matter
    refused: str = ""  # why sbatch rejected it; "": it did not
    state: str = "PENDING"  # as Slurm names it
    nodes: list[str] = field(default_factory=list)  # that it had last
    restarts: int = 0  # how often Slurm has started it again
    output: str = ""
    starts: list[Start] = field(default_factory=list)
    epochs_asked: int = 0
    epochs: list[int] = field(default_factory=list)  # that it trained, counted from 0
    launchers: dict[str, int] | None = None  # by node: the torchruns there when it stalled; None: it did not stall
    commands: list[list[str]] = field(default_factory=list)  # the command lines of these torchruns
    fault: str = ""  # what the check did to it: the node that it killed, or the signal that it sent; "": nothing
    before: int = 0  # the number of epochs that it had trained when Slurm started it again
    processes: int = 0  # that the log of its training names; 0: there is no log

    @property
    def known_shape(self) -> "Shape":
        """The shape that the check ran it in."""
        if self.shape is None:
            raise ValueError(f"the shape of job {self.number} is not known")
        return self.shape

    @property
    def last_error(self) -> str:
        """The line of its output that says most about what went wrong."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"error|not found|cannot|No such", line, re.IGNORECASE)]
        return (telling or lines or ["it printed nothing"])[-1][:300]
