"""How many processes Lightning starts or expects, in the runs that the check makes of a program with Lightning."""

import importlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from workshop.check.probes.recorder import Recorder

USED = re.compile(r"^\s*(?:import|from)\s+(?:pytorch_)?lightning\b", re.MULTILINE)
# What Lightning passes to the processes that it starts.
HYDRA = ("hydra.output_subdir=null", "hydra.job.name=train_ddp_process_1")
TRAINERS = ("lightning.pytorch", "pytorch_lightning")
GIVEN = re.compile(
    r"""\bdevices\s*=(?!\s*["']?(?:auto|-1))|\baccelerator\s*=\s*["']cpu"""
)  # the number of processes, or no GPU
FABRICS = ("lightning.fabric", "lightning_fabric")


def uses_all_gpus(text: str) -> bool:
    """Whether a program with Lightning leaves it to the machine how many processes train: one for each GPU."""
    return bool(USED.search(text)) and not GIVEN.search(text)


class Ranks:
    """Lets Lightning write how many processes it would start, and end."""

    def __init__(self, file: Path):
        self.file = file

    def __call__(self, recorder: Recorder) -> None:
        """Replace the function that starts the processes."""
        for module in _imported(*TRAINERS, *FABRICS, part="strategies.launchers.subprocess_script"):
            launcher = module._SubprocessScriptLauncher
            launcher._call_children_scripts = lambda launcher: self._end(launcher.num_processes)

    def _end(self, number: int) -> None:
        self.file.write_text(str(number))
        os._exit(0)


def alone(before: Callable[[Recorder], None]) -> Callable[[Recorder], None]:
    """Return a function for ``Program.before`` that also lets Lightning train with one process, whatever the program asks."""

    def both(recorder: Recorder) -> None:
        for module in _imported(*TRAINERS, part="trainer.connectors.accelerator_connector"):
            _with_one_device(module._AcceleratorConnector)
        for module in _imported(*FABRICS, part="connector"):
            _with_one_device(module._Connector)
        before(recorder)

    return both


def _with_one_device(connector: Any) -> None:
    original = connector.__init__

    @wraps(original)
    def made(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options | {"devices": 1, "num_nodes": 1})

    connector.__init__ = made


def _imported(*names: str, part: str) -> Iterator[Any]:
    for name in names:
        with suppress(ImportError):
            yield importlib.import_module(f"{name}.{part}")
