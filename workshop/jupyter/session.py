"""Prepare the server of an Open OnDemand session: python -m workshop.jupyter.session FOLDER SESSION BASE_URL PORT

Copies the workshop that this Python imports into FOLDER, writes the settings of the server and a kernel below SESSION/jupyter,
and prints the notebook to open. The variable WORKSHOP_PASSWORD contains the password.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.jupyter.kernel import write_kernel, write_page_settings
from workshop.repository import ORIGIN, ROOT

NOTEBOOK = "01_single_gpu/01_single_gpu.ipynb"
NEEDED = 50_000_000  # bytes for the copy and a first run
LEFT_OUT = {"runs", "__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".ruff_cache"}
LEFT_OUT_AT_THE_TOP = {".git", ".venv", ".jupyter", ".ci", "data"}
COPIED = ".copied.json"  # in the copy: the hash of each file when it was copied
SETTINGS = """\
c = get_config()
c.ServerApp.ip = "0.0.0.0"
c.ServerApp.port = {port}
c.ServerApp.port_retries = 0
c.ServerApp.open_browser = False
c.ServerApp.base_url = {base_url!r}
c.ServerApp.root_dir = {folder!r}
c.PasswordIdentityProvider.hashed_password = {hashed!r}
c.IdentityProvider.token = ""
# The browser connects through the proxy of Open OnDemand, and a page of Open OnDemand sends the login.
c.ServerApp.allow_origin = "*"
c.ServerApp.allow_remote_access = True
c.ServerApp.disable_check_xsrf = True
c.ServerApp.jpserver_extensions = {{"workshop.jupyter.board": True}}
"""


def copy_workshop(target: Path) -> str:
    """Copy new files to ``target``, update the files that the learner has not changed, and return a summary in one sentence.

    Raises:
        UserError: the folder is not writable, or the disk is full.
    """
    if target.resolve() == ROOT:
        return f"{target} is the workshop itself: nothing to copy"
    record = target / COPIED
    try:
        target.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target).free < NEEDED:
            raise UserError(
                f"The disk that holds {target} is full: free at least {NEEDED // 1_000_000} MB, and start a new session."
            )
        copied = _read_record(record)
        new = renewed = kept = 0
        for source in _files():
            name = str(source.relative_to(ROOT))
            place, content = target / name, _read(source)
            if place.exists():
                there = place.read_bytes()
                if there == content:
                    copied[name] = _hash(content)
                    continue
                if copied.get(name) != _hash(there):  # changed by the learner
                    kept += 1
                    continue
                renewed += 1
            elif name in copied:  # deleted by the learner
                continue
            else:
                new += 1
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, content)
            place.chmod(source.stat().st_mode | 0o600)  # writable for the learner, even if the original is not
            copied[name] = _hash(content)
        write_atomically(record, json.dumps(copied, indent=0).encode())
        # The copy uses the shared environment, also in a terminal, because a separate one would take 6 GB per learner.
        # "workshop reset" restores exercises from the shared folder.
        python = shutil.which(os.environ.get("WORKSHOP_PYTHON", "")) or sys.executable
        write_atomically(target / ORIGIN, f"{python}\n{ROOT}\n".encode())
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}): free space in your home folder, and start a new session."
        ) from error
    return f"{target}: {new} files copied, {renewed} renewed, {kept} of yours kept as they are"


def _files() -> list[Path]:
    found = []
    for folder, names, files in os.walk(ROOT):
        without = LEFT_OUT | LEFT_OUT_AT_THE_TOP if Path(folder) == ROOT else LEFT_OUT
        names[:] = sorted(name for name in names if name not in without and not name.endswith(".egg-info"))
        found += [
            Path(folder, name)
            for name in sorted(files)
            if not name.startswith((".progress", ".venv", ".copied", ".workshop"))
        ]
    return found


def _read(source: Path) -> bytes:
    try:
        return source.read_bytes()
    except OSError as error:
        raise UserError(
            f"{source} cannot be read ({error.strerror}): ask the organizers of the course to make it readable."
        ) from error


def _read_record(path: Path) -> dict[str, str]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # missing or damaged: every file that differs counts as changed by the learner
        return {}


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_settings(session: Path, folder: Path, base_url: str, port: int, password: str) -> None:
    """Write the settings of the server and the kernel, readable only by their owner."""
    from jupyter_server.auth import passwd

    os.umask(0o077)
    place = session / "jupyter"
    place.mkdir(exist_ok=True)
    settings = SETTINGS.format(port=port, base_url=base_url, folder=str(folder), hashed=passwd(password))
    (place / "jupyter_server_config.py").write_text(settings)
    write_page_settings(place)
    write_kernel(place, folder)


def main() -> None:
    folder, session, base_url, port = sys.argv[1:]
    target = Path(folder).expanduser()
    try:
        print(copy_workshop(target), file=sys.stderr)
        write_settings(Path(session), target, base_url, int(port), os.environ["WORKSHOP_PASSWORD"])
    except UserError as error:
        sys.exit(str(error))
    print(NOTEBOOK)


if __name__ == "__main__":
    main()
