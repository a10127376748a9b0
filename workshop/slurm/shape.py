"""What a job asks for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What a job asks for.

    Attributes:
        nodes: nodes.
        gpus: GPUs on each node.
        tasks: tasks (processes that the launcher starts) on each node.
        cores: cores for each task; 0: not said.
        seconds: the time limit; 0: not said.
    """

    nodes: int
    gpus: int
    tasks: int
    cores: int = 0
    seconds: int = 0

    @property
    def all_gpus(self) -> int:
        """The GPUs of all nodes together."""
        return self.nodes * self.gpus

    def options(self, gres: bool) -> list[str]:
        """The options of sbatch, without the time limit.

        Args:
            gres: ask for the GPUs with --gres. A request in one of the two ways does not replace one in the other.
        """
        options = [
            f"--nodes={self.nodes}",
            f"--gres=gpu:{self.gpus}" if gres else f"--gpus-per-node={self.gpus}",
            f"--ntasks-per-node={self.tasks}",
        ]
        return [*options, f"--cpus-per-task={self.cores}"] if self.cores else options

    def __str__(self) -> str:
        words = f"{_count(self.nodes, 'node')} with {_count(self.gpus, 'GPU')}"
        if self.cores:
            words += f" and {_count(self.tasks, 'task')} each, {_count(self.cores, 'core')} a task"
        return f"{words} for {clock(self.seconds)}" if self.seconds else words


def clock(seconds: int) -> str:
    """Seconds as HH:MM:SS, which Slurm and PBS both take."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
