"""The pretended GPUs of a process that a command starts: they exist from ``import torch`` on, and the process reports on them."""

import atexit
import json
import os
import sys
import threading
from pathlib import Path

from workshop.pretend.collectives import NODE

GPUS = "WORKSHOP_PRETEND"  # the number of GPUs of a node; the processes of a program see them if it is set
REPORT = "WORKSHOP_PRETEND_REPORT"  # the folder for the reports
BOOT = Path(__file__).with_name("boot")  # a folder for PYTHONPATH
SECONDS = 0.5  # between two reports: a launcher may end a process at any time, and it then cannot report any more


def variables(gpus: int, python_path: str, report: Path | None = None, node: int = 0) -> dict[str, str]:
    """Return the environment variables that give the processes of a program pretended GPUs.

    Args:
        gpus: pretended GPUs per node.
        python_path: the ``PYTHONPATH`` of the program, which has to contain the workshop.
        report: the folder in which each process writes its report.
        node: the number of the simulated node.
    """
    found = {GPUS: str(gpus), NODE: str(node), "PYTHONPATH": os.pathsep.join((str(BOOT), python_path))}
    return found | ({REPORT: str(report)} if report else {})


def start() -> None:
    """Give this process its pretended GPUs. ``boot/sitecustomize.py`` calls this when torch has been imported."""
    from workshop.errors import UserError
    from workshop.pretend.installation import install

    try:
        install(int(os.environ[GPUS]))
    except UserError as error:
        sys.exit(str(error))
    if folder := os.environ.get(REPORT):
        _report_until_the_end(Path(folder))
        os.register_at_fork(after_in_child=lambda: _report_until_the_end(Path(folder)))


def refuse_deepspeed() -> None:
    """Let DeepSpeed, which has been imported, refuse to train."""
    deepspeed = sys.modules["deepspeed"]

    def initialize(*_: object, **__: object) -> None:
        sys.exit(
            'DeepSpeed has CUDA code of its own, which pretended GPUs cannot run: hide them with CUDA_VISIBLE_DEVICES=""'
        )

    deepspeed.initialize = initialize  # type: ignore[attr-defined]


def _report_until_the_end(folder: Path) -> None:
    atexit.register(_write, folder)
    ended = threading.Event()
    threading._register_atexit(ended.set)  # type: ignore[attr-defined]

    def repeat() -> None:
        while not ended.wait(SECONDS):
            _write(folder)

    threading.Thread(target=repeat, daemon=True).start()


def _write(folder: Path) -> None:
    from workshop.pretend import devices

    if not devices.used and not devices.notes:
        return
    found = {
        "rank": int(os.environ.get("RANK", 0)),
        "node": int(os.environ.get(NODE, 0)),
        "gpu": devices.current(),
        "visible": devices.visible(),
        "peak": {str(index): devices.peak[index] for index in range(devices.count()) if devices.peak[index]},
        "notes": [(*what, dict(places)) for what, places in list(devices.notes.items())],
    }
    target = folder / f"{os.getpid()}.json"
    part = target.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(target)
