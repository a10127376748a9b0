"""Create an environment for each set of versions with uv in a temporary folder, and run commands in it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from workshop.errors import UserError
from workshop.run.environment import environment, without_launcher
from workshop.run.processes import family

# The arguments of `uv pip install` for the environment of each set, in the order in which the sets run.
DEPENDENCIES = ("--all-extras", "-r", "pyproject.toml")
SETS = {
    "oldest": ("--resolution=lowest-direct", *DEPENDENCIES),
    "lock": ("--require-hashes", "-r", "requirements.lock"),
    "newest": ("--resolution=highest", "--prerelease=disallow", "--upgrade", *DEPENDENCIES),
}
INSTALL = 1800  # seconds, the time limit for creating an environment
GRACE = 10  # seconds that pytest has to clean up before it is killed

LOOK = """
import importlib.metadata as metadata, json, platform
versions = {each.name: each.version for each in metadata.distributions()}
print(json.dumps([{"python": platform.python_version()} | versions, metadata.packages_distributions()]))
"""


@dataclass(frozen=True)
class Environment:
    """An environment with one set of versions.

    Attributes:
        root: the repository that it is for.
        folder: the temporary folder that contains the environment, and the files that its commands write.
        versions: the version of Python, and of each package by its name.
        modules: the packages that provide each module name.
    """

    root: Path
    folder: Path
    versions: dict[str, str]
    modules: dict[str, list[str]]

    @property
    def python(self) -> Path:
        return _python(self.folder)

    def variables(self) -> dict[str, str]:
        """Return the environment variables for tests, which write their temporary files to the temporary folder."""
        ours = ("PYTHON", "PYTEST", "WORKSHOP_", "VIRTUAL_ENV", "CONDA")
        changes: dict[str, Any] = {name: None for name in os.environ if name.startswith(ours)}
        scratch = self.folder / "t"
        # DeepSpeed compiles its extension for one version of torch, so it must not find the build of a different set.
        changes |= {"TMPDIR": scratch, "TORCH_EXTENSIONS_DIR": scratch / "torch_extensions", "COLUMNS": 200}
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return environment(**changes | {"WORKSHOP_PYTHON": self.python, "PYTHONPATH": self.root, "PATH": path})


@contextmanager
def made(name: str, root: Path) -> Iterator[Environment]:
    """Create the environment of a set, and remove it afterwards.

    Args:
        name: a name in ``SETS``.
        root: the repository whose pyproject.toml or requirements.lock lists the packages.

    Raises:
        UserError: uv cannot create it (the message contains that of uv), or the packages for the tests are not in it.
    """
    python = sys.executable if name != "oldest" else re.findall(r"[\d.]+", _project(root)["requires-python"])[0]
    # A short name, because the sockets of a practice cluster are in this folder and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="wv-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        (folder / "t").mkdir()
        venv = ["venv", "--quiet", "--no-project", "--python", python, folder / "venv"]
        install = ["pip", "install", "--quiet", "--compile-bytecode", "--python", _python(folder), *SETS[name]]
        if failure := _call_uv(venv, root, folder) or _call_uv(install, root, folder):
            raise UserError(f"uv cannot create the environment of {name}: {failure}")
        ready = look(root, folder)
        if "pytest" not in ready.versions:
            raise UserError(f"{name} has no pytest: the packages for the tests belong to the extras in pyproject.toml")
        try:
            yield ready
        finally:
            _end_strays(folder)


def _end_strays(folder: Path) -> None:
    """End the processes that failed tests have left running, which have TMPDIR in this folder."""
    strays = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder / "t"):
                process.kill()
                strays.append(process)
    psutil.wait_procs(strays, timeout=GRACE)


def look(root: Path, folder: Path) -> Environment:
    """Return the environment in ``folder`` with the packages that it contains now."""
    done = subprocess.run([_python(folder), "-I", "-c", LOOK], capture_output=True, text=True, check=True)
    versions, modules = json.loads(done.stdout)
    return Environment(root, folder, {plain_name(name): each for name, each in versions.items()}, modules)


def put_back(newest: Environment, package: str, version: str) -> Environment:
    """Install a different version of one package into the newest environment, with all changes that it requires.

    Raises:
        UserError: uv finds no compatible versions.
    """
    everything = newest.folder / "newest.txt"
    lines = [f"{name}=={each}\n" for name, each in newest.versions.items() if name != "python"]
    everything.write_text("".join(lines))
    python = ["--quiet", "--python", newest.python]
    back = ["pip", "sync", *python, everything]
    # With the dependencies of the project, so that uv also changes a torchvision that needs the new torch.
    put = ["pip", "install", *python, *DEPENDENCIES, f"{package}=={version}"]
    if failure := _call_uv(back, newest.root, newest.folder) or _call_uv(put, newest.root, newest.folder):
        raise UserError(f"{package} {version} cannot be put back: {failure}")
    return look(newest.root, newest.folder)


def _call_uv(arguments: Sequence, root: Path, folder: Path) -> str:
    """Call uv in the repository; return why it failed, or ""."""
    log = folder / "uv.txt"
    # Python finds outdated bytecode by the time (in seconds) and size of its source. Two versions of a file in uv's cache may
    # share both, and here one version replaces the other, so Python must compare the content.
    variables = without_launcher(os.environ) | {"PYC_INVALIDATION_MODE": "CHECKED_HASH"}
    status = run_to_file([find_uv(), *arguments], variables, root, log, INSTALL)
    if status is None:
        return f"not finished after {INSTALL} s"
    return "" if status == 0 else " ".join(log.read_text(errors="replace").split()) or f"exit status {status}"


def find_uv() -> str:
    """Return the path of uv, on the PATH or beside this Python.

    Raises:
        UserError: uv is not installed.
    """
    program = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
    if program is None:
        raise UserError(f"uv, which creates the environments, is not installed: {sys.executable} -m pip install uv")
    return program


def run_to_file(command: Sequence, environment: dict[str, str], folder: Path, log: Path, seconds: float) -> int | None:
    """Run a command with its output in the file ``log``; return its exit status, or None if it exceeded the time limit.

    The command has its own session, so Ctrl-C reaches only this process, which then ends the command and all its children.
    """
    with open(log, "w") as file:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        members = family(process.pid)  # empty if it has ended by itself
        if members:
            # Like Ctrl-C: pytest then ends its tests, and writes its report.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            members = psutil.wait_procs(members, timeout=GRACE)[1]
            for member in {*members, *family(process.pid)}:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
        process.wait()


def direct_dependencies(root: Path) -> list[str]:
    """Return the names of the packages in pyproject.toml, including extras."""
    project = _project(root)
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return list(dict.fromkeys(plain_name(re.findall(r"^[\w.-]+", line)[0]) for line in lines))


def _project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _python(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"
