"""What a job script asks Slurm for, and what a job of it did."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workshop.slurm.shape import Shape

PROGRAM = "multigpu_torchrun.py"  # the training program that the job scripts start


@dataclass(frozen=True)
class Request:
    """What Slurm understands of the directives of a script.

    Attributes:
        asked: the shape that the script asks for; None: Slurm rejects it.
        wanted: the shape that it should ask for; None: any.
        options: the options that sbatch took from it, such as {"signal": "B:USR1@60"}.
        refused: why Slurm rejects it; "": it does not.
        alone: only Slurm's controller was asked, because no job can run on this machine.
    """

    asked: "Shape | None"
    wanted: "Shape | None" = None
    options: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Start:
    """A process of the training program, as it started.

    Attributes:
        host: the node that it runs on.
        environment: the variables that its launcher may have set for it, of those that the check reads.
        launcher: the command line of the process that started it.
        step: what Slurm says of its job step; "": it is in none.
    """

    host: str
    environment: dict[str, str]
    launcher: tuple[str, ...]
    step: str


@dataclass
class Job:
    """A job and what is known about it.

    Attributes:
        number: its job id; "": it was not submitted.
        options: those that sbatch took from the script and the command line, such as {"signal": "B:USR1@60"}.
        shape: the shape that the check ran it in; None: it does not matter.
        refused: why sbatch rejected it; "": it did not.
        state: as Slurm names it.
        nodes: the nodes that it had last.
        restarts: how often Slurm has started it again.
        output: what it has printed.
        starts: the processes of the training program, in the order of time.
        epochs_asked: how many epochs it was to train.
        epochs: those that it trained, counted from 0, in the order of time.
        launchers: for each node the number of torchruns that were there when it stalled; None: it did not stall.
        commands: the command lines of these.
        fault: what the check did to it while it trained: the node that it killed, or the signal that it sent; "": nothing.
        before: the number of epochs that it had trained when Slurm started it again.
        processes: the number of processes that the log of its training names; 0: there is no log.
    """

    number: str = ""
    options: dict[str, str] = field(default_factory=dict)
    shape: "Shape | None" = None
    refused: str = ""
    state: str = "PENDING"
    nodes: list[str] = field(default_factory=list)
    restarts: int = 0
    output: str = ""
    starts: list[Start] = field(default_factory=list)
    epochs_asked: int = 0
    epochs: list[int] = field(default_factory=list)
    launchers: dict[str, int] | None = None
    commands: list[list[str]] = field(default_factory=list)
    fault: str = ""
    before: int = 0
    processes: int = 0

    @property
    def last_error(self) -> str:
        """The line of its output that says most about what went wrong."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"error|not found|cannot|No such", line, re.IGNORECASE)]
        return (telling or lines or ["it printed nothing"])[-1][:300]
