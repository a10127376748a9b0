"""What an Open OnDemand session needs before its server starts: python -m workshop.jupyter.session FOLDER SESSION BASE_URL PORT

Copies the workshop that this Python imports into FOLDER, writes the server's settings and a kernel below SESSION/jupyter, and
prints the notebook to open. The password comes in WORKSHOP_PASSWORD.
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
NEEDED = 50_000_000  # bytes of free disk for the copy and a first run
LEFT_OUT = {"runs", "__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".ruff_cache"}
LEFT_OUT_AT_THE_TOP = {".git", ".venv", ".jupyter", ".ci", "data"}
COPIED = ".copied.json"  # in the copy: what each file was when it came
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
# The browser speaks to Open OnDemand, which hands on to this server, and the login comes from a page of Open OnDemand's.
c.ServerApp.allow_origin = "*"
c.ServerApp.allow_remote_access = True
c.ServerApp.disable_check_xsrf = True
"""


def copy_workshop(target: Path) -> str:
    """Copy what is not in ``target`` yet, and renew what the learner has not touched; return in one sentence what was done.

    Raises:
        UserError: it cannot be written, or there is no room.
    """
    if target.resolve() == ROOT:
        return f"{target} is the workshop itself: nothing to copy"
    record = target / COPIED
    try:
        target.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target).free < NEEDED:
            raise UserError(
                f"The disk that holds {target} is full: free {NEEDED // 1_000_000} MB of it, and start a new session."
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
                if copied.get(name) != _hash(there):  # theirs
                    kept += 1
                    continue
                renewed += 1
            elif name in copied:  # deleted by the learner
                continue
            else:
                new += 1
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, content)
            place.chmod(source.stat().st_mode | 0o600)  # the shared one may be protected; this one is theirs to change
            copied[name] = _hash(content)
        write_atomically(record, json.dumps(copied, indent=0).encode())
        # The copy uses the environment that is there already, also from a terminal: its own would be 6 GB for each learner.
        # And from the folder, "workshop reset" knows what an exercise was.
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
            f"{source} cannot be read ({error.strerror}): whoever runs the course has to make it readable."
        ) from error


def _read_record(path: Path) -> dict[str, str]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # there is none yet; damaged: then everything that differs counts as theirs
        return {}


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_settings(session: Path, folder: Path, base_url: str, port: int, password: str) -> None:
    """Write the server's settings and the kernel, readable by their owner alone."""
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
