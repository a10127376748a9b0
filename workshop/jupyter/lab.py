"""Run ``workshop lab``: start JupyterLab in the repository with a kernel for this environment, protected by a token."""

import errno
import importlib.util
import os
import secrets
import shutil
import socket
import sys
from pathlib import Path

from workshop.errors import UserError
from workshop.jupyter.kernel import write_kernel, write_page_settings
from workshop.repository import require_stages

FIRST_PORT = 8888
NOTEBOOK = "01_single_gpu/01_single_gpu.ipynb"
NEEDED = 20_000_000  # bytes that a session writes: settings, kernel, outputs
# The server reads these settings instead of those in the home folder, which might, for example, set an empty token. The token
# is in the environment, because all users of the machine can read the command line.
SETTINGS = """\
import os

c = get_config()
c.IdentityProvider.token = os.environ.pop("WORKSHOP_TOKEN")
c.PasswordIdentityProvider.hashed_password = ""
c.ServerApp.open_browser = os.environ.pop("WORKSHOP_BROWSER") == "1"
c.ServerApp.port_retries = 0
c.ServerApp.jpserver_extensions = {"workshop.jupyter.board": True}
"""


def run_lab(port: int | None, ip: str, browser: bool) -> None:
    """Replace this process with JupyterLab.

    Args:
        port: the port of the server; None: 8888, or the next free port.
        ip: the address that the server listens on.
        browser: open a browser, if there is one.

    Raises:
        UserError: packages for the notebooks are missing, the port is taken, or the disk is full.
    """
    root = require_stages()
    missing = [name for name in ("jupyterlab", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing: {sys.executable} -m pip install -e '{root}[notebooks]'")
    port = _port(port, ip)
    settings = _settings_folder(root)
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    environment = os.environ | {
        "JUPYTER_PATH": os.pathsep.join(filter(None, [str(settings), os.environ.get("JUPYTER_PATH")])),
        "JUPYTER_CONFIG_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(settings / "workspaces"),
        "WORKSHOP_TOKEN": token,
        "WORKSHOP_BROWSER": str(int(browser)),
        "WORKSHOP_LAB": "/",  # the path below which it serves its pages
    }
    environment.pop("JUPYTER_TOKEN", None)
    print(
        f"workshop: JupyterLab (press Ctrl-C to stop it): http://{_shown(ip)}:{port}/lab/tree/{NOTEBOOK}?token={token}",
        flush=True,
    )
    options = [f"--ServerApp.ip={ip}", f"--ServerApp.port={port}", f"--ServerApp.root_dir={root}"]
    if os.geteuid() == 0:
        options.append("--allow-root")
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        *options,
        f"--LabApp.default_url=/lab/tree/{NOTEBOOK}",
        "--log-level=WARN",
    ]
    os.chdir(root)
    os.execve(sys.executable, command, environment)


def _port(wanted: int | None, ip: str) -> int:
    """Return a free port."""
    for port in [wanted] if wanted else range(FIRST_PORT, FIRST_PORT + 50):
        try:
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            with socket.create_server((ip, port), family=family):
                return port
        except PermissionError as error:
            raise UserError(f"port {port}: only root may use it; choose a port from 1024 on with --port") from error
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(f"--ip {ip}: this machine has no such address") from error
    if wanted:
        raise UserError(f"port {wanted} is taken, perhaps by a running JupyterLab; choose a different port with --port")
    raise UserError(f"no port from {FIRST_PORT} to {FIRST_PORT + 49} is free; choose a port with --port")


def _shown(ip: str) -> str:
    """Return the host name to open in a browser on this machine."""
    return "127.0.0.1" if ip in ("0.0.0.0", "::", "") else f"[{ip}]" if ":" in ip else ip


def _settings_folder(root: Path) -> Path:
    """Write the settings and the kernel of a session into the folder ``.jupyter`` of the repository, and return the folder.

    Raises:
        UserError: the folder is not writable, or the disk is full.
    """
    folder = root / ".jupyter"
    try:
        if shutil.disk_usage(root).free < NEEDED:
            raise UserError(f"the disk that holds {root} is full; free at least {NEEDED // 1_000_000} MB")
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "jupyter_server_config.py").write_text(SETTINGS)
        write_page_settings(folder)
        write_kernel(folder)
    except OSError as error:
        raise UserError(
            f"{folder} is not writable ({error.strerror}): copy the workshop to a folder of your own, on a disk with free space"
        ) from error
    return folder
