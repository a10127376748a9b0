"""Write a kernel for this environment into a folder of the workshop, so that nothing is installed in the home folder."""

import json
import sys
from pathlib import Path

from workshop.files import write_atomically
from workshop.repository import ROOT, python_path


def write_kernel(folder: Path, root: Path = ROOT) -> Path:
    """Write a kernel specification for this Python below ``folder``, and return the path to put first in ``JUPYTER_PATH``.

    The kernel is called "python3", the name in every notebook, so notebooks open with this environment even if there are
    other kernels.

    Args:
        folder: the folder for the specification.
        root: the copy of the workshop that notebooks import from.
    """
    place = folder / "kernels" / "python3"
    place.mkdir(parents=True, exist_ok=True)
    kernel = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Workshop",
        "language": "python",
        "metadata": {"debugger": True},
        "env": {"PYTHONPATH": python_path(root), "WORKSHOP_PYTHON": sys.executable},
    }
    write_atomically(place / "kernel.json", json.dumps(kernel, indent=1))
    return folder


def write_page_settings(folder: Path) -> None:
    """Disable the news of JupyterLab, which come from the internet; ``folder`` is its ``JUPYTER_CONFIG_DIR``."""
    (folder / "labconfig").mkdir(exist_ok=True)
    silent = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (folder / "labconfig" / "page_config.json").write_text(json.dumps(silent))
