"""The kernel of this environment, in a folder of the workshop's own: nothing is installed in the learner's home."""

import json
import sys
from pathlib import Path

from workshop.files import write_atomically
from workshop.repository import ROOT, python_path


def write_kernel(folder: Path, root: Path = ROOT) -> Path:
    """Write a kernel specification of this Python below ``folder``, and return what to put in front of ``JUPYTER_PATH``.

    It is called "python3", the name that every notebook asks for: so a notebook opens with this environment, whichever others
    there are.

    Args:
        folder: where it goes.
        root: the copy of the workshop that notebooks are to import from.
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
    """Let JupyterLab, with ``folder`` as its ``JUPYTER_CONFIG_DIR``, not ask about news from the internet."""
    (folder / "labconfig").mkdir(exist_ok=True)
    silent = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (folder / "labconfig" / "page_config.json").write_text(json.dumps(silent))
