"""The functions that the notebooks call: first ``start``, then pictures, checks and cells in several processes."""

import importlib.util
import os
import platform
import shutil
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

from workshop.course.progress import sharing_path
from workshop.course.sharing import share
from workshop.jupyter.checking import check, hint
from workshop.jupyter.pictures import (
    show_bars,
    show_curves,
    show_losses,
    show_parts,
    show_plot,
    show_shares,
    show_timeline,
    show_which,
)
from workshop.repository import ROOT, python_path
from workshop.run.environment import why_hidden
from workshop.run.machine import cores, gpus_unopened
from workshop.training.finetuning import read_training
from workshop.training.logs import read_log

__all__ = [
    "ROOT",
    "check",
    "hint",
    "read_log",
    "read_training",
    "show_bars",
    "show_curves",
    "show_losses",
    "show_parts",
    "show_plot",
    "show_shares",
    "show_timeline",
    "show_which",
    "start",
]

NEEDED = 200_000_000  # bytes that the runs of a notebook write at most


def start(folder: str, processes: int = 1, package: str = "torch") -> None:
    """Prepare a notebook: check the session, change to the notebook's folder, and register ``%%ranks``.

    Args:
        folder: the folder of the notebook in the repository.
        processes: the number of processes that train at the same time. With fewer GPUs, the GPUs are hidden and all runs use the
            CPU, so that they can be compared.
        package: an optional package that the notebook needs.

    Raises:
        SystemExit: the session has a problem; the message says what to do. The cells below are not run.
    """
    problem = _problem(ROOT / folder, package)
    if problem:
        raise SystemExit(problem)
    os.chdir(ROOT / folder)
    warnings.filterwarnings("ignore", "IProgress not found")  # from tqdm, if a library shows progress bars
    # For %%bash cells, and for the runners that they start.
    os.environ["ROOT"] = str(ROOT)
    os.environ["PYTHON"] = os.environ["WORKSHOP_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = python_path()
    from IPython import get_ipython

    from workshop.jupyter import ranks

    get_ipython().register_magic_function(ranks.ranks, "cell")
    gpus = gpus_unopened()
    here = f"{cores()} CPU cores, {gpus or 'no'} GPU{'' if gpus == 1 else 's'}"
    share(sharing_path(), event="start", stage=folder)
    print(f"Python {platform.python_version()}, torch {version('torch')}, {here}")
    if gpus < processes:
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
        print(why_hidden(processes, gpus) or "training runs on the CPU")


def _problem(place: Path, package: str = "torch") -> str:
    """Return the problem of this session in one sentence; "" if there is none."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch: choose the kernel 'Workshop', or start Jupyter with ./workshop.sh lab"
    if importlib.util.find_spec(package) is None:
        return f"This notebook needs {package}: run pip install -e '.[{package}]' in {ROOT}, then restart the kernel."
    here = Path.cwd()
    if not place.is_dir():
        return f"There is no folder {place}: open the notebook in a complete copy of the workshop."
    if here != place and ROOT not in (here, *here.parents):
        return (
            f"This notebook is in {here}, but its kernel belongs to the workshop in {ROOT}: "
            "open the notebook there, or choose the kernel of this copy (menu Kernel, Change Kernel)."
        )
    if not os.access(place, os.W_OK):
        return f"{place} is not writable: copy the workshop to a folder of your own, and open the notebook there."
    if shutil.disk_usage(place).free < NEEDED:
        return f"The disk that holds {place} is full: free at least {NEEDED // 1_000_000} MB."
    return ""
