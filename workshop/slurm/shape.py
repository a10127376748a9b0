"""What a job requests."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What a job requests.

    Attributes:
        nodes: the number of nodes.
        gpus: GPUs per node.
        tasks: tasks (processes that the launcher starts) per node.
        cores: cores per task; 0: not given.
        seconds: the time limit; 0: not given.
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
        """Return the options for sbatch, without the time limit.

        Args:
            gres: request the GPUs with --gres. Slurm does not let --gpus-per-node replace a --gres, or the reverse.
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
            words += f" and {_count(self.tasks, 'task')} each, {_count(self.cores, 'core')} per task"
        return f"{words} for {clock(self.seconds)}" if self.seconds else words


def clock(seconds: int) -> str:
    """Return seconds as HH:MM:SS, which Slurm and PBS both accept."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
