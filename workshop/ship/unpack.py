"""Create the environment from a pack, without network: ``workshop.sh`` runs this file if it finds a ``pack.json``.

It uses only Python's standard library and no module of the workshop, because no package is installed yet.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "pack.json"
WHEELS = "wheels"
REQUIREMENTS = f"{WHEELS}/requirements.txt"
CHECKED = ".pack_checked"  # SHA-256 of the manifest after its files were complete; learners may change them then
SHOWN = 20  # a message names at most this number of files
# Errno 28: no space left. 122: the quota is used up.
DISK_FULL = re.compile(r"errno (28|122)\b|os error (28|122)\b|no space left|quota exceeded", re.IGNORECASE)
IDENTITY = "import platform, sys; print(sys.implementation.name, *sys.version_info[:2], platform.machine())"


class PackError(Exception):
    """An error that one sentence explains, shown on standard error with exit status 2."""


def main() -> None:
    """Set up the pack in the folder that the command line names."""
    root = Path(sys.argv[1])
    try:
        set_up(root)
    except PackError as error:
        message = str(error)
    except OSError as error:
        full = DISK_FULL.search(str(error))
        message = full_sentence(root) if full else f"cannot set up {root}: {error}"
    except KeyboardInterrupt:
        sys.exit(130)
    else:
        return
    print(f"workshop.sh: {message}", file=sys.stderr)
    sys.exit(2)


def set_up(root: Path) -> None:
    """Check that the pack in ``root`` is complete and fits this machine, and install its wheels into ``.venv`` there.

    Raises:
        PackError: the pack is incomplete or for a different machine or Python, the disk is full, or a wheel cannot be installed.
    """
    pack = read_manifest(root)
    python = find_python(pack)
    start = time.monotonic()
    size = sum(entry["size"] for entry in pack["files"].values())
    print(f"workshop.sh: checking the pack ({len(pack['files'])} files, {size / 1e9:.1f} GB)", file=sys.stderr)
    check_files(root, pack)
    checked = time.monotonic()
    free = shutil.disk_usage(root).free
    if free < pack["installed_size"]:
        raise PackError(
            f"the environment needs {pack['installed_size'] / 1e9:.1f} GB in {root}, but only {free / 1e9:.1f} GB are free"
        )
    print(
        f"workshop.sh: creating the environment in .venv from the pack, without network ({len(pack['versions'])} packages, "
        f"{pack['installed_size'] / 1e9:.1f} GB)",
        file=sys.stderr,
    )
    install(root, pack, python)
    print(
        f"workshop.sh: checked in {checked - start:.1f} s, installed in {time.monotonic() - checked:.1f} s",
        file=sys.stderr,
    )


def read_manifest(root: Path) -> dict:
    """Return what ``workshop pack`` has written about the pack in ``root``.

    Raises:
        PackError: the file is missing or incomplete.
    """
    try:
        pack = json.loads((root / MANIFEST).read_text())
        return {name: pack[name] for name in ("platform", "python", "glibc", "versions", "installed_size", "files")}
    except (OSError, ValueError, KeyError) as error:
        raise PackError(f"{root / MANIFEST} is incomplete: copy the pack here again") from error


def find_python(pack: dict) -> str:
    """Return the path of a Python that fits the wheels of the pack: this one, or a different one on the PATH.

    Raises:
        PackError: the pack is for a different machine, or there is no such Python.
    """
    machine, here = platform.machine(), "{}.{}".format(*sys.version_info[:2])
    libc = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else ""  # "glibc 2.36"; "" or None with musl
    version = tuple(int(part) for part in re.findall(r"\d+", libc or "")[:2])
    wanted = f"this pack is for {pack['platform']} and Python {pack['python']}"
    if sys.platform != "linux" or machine != pack["platform"]:
        raise PackError(
            f"{wanted} on Linux, but this machine has {machine} and Python {here} on {sys.platform}: pack it again, on a machine "
            f"with internet, with --platform {machine}"
        )
    if version < tuple(int(part) for part in pack["glibc"].split(".")):
        raise PackError(f"{wanted} on Linux with glibc {pack['glibc']} or newer, this machine has {libc or 'no glibc'}")
    for name in (sys.executable, f"python{pack['python']}", "python3", "python"):
        path = shutil.which(name)
        if path and identity(path) == f"cpython {pack['python'].replace('.', ' ')} {machine}":
            return path
    raise PackError(
        f"{wanted}, but this machine has {machine} and Python {here}: put python{pack['python']} on the PATH (on a "
        f"cluster: module load python), or pack it again, on a machine with internet, with --python {here}"
    )


def identity(python: str) -> str:
    """Return how a Python identifies itself, or "" if it does not run (the name may be only a placeholder)."""
    try:
        done = subprocess.run([python, "-I", "-c", IDENTITY], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def check_files(root: Path, pack: dict) -> None:
    """Compare the files in ``root`` with the packed files; after the first success, compare only the wheels.

    Only the sizes of wheels are compared, because uv checks their SHA-256 when it installs them.

    Raises:
        PackError: it names the files that are missing, truncated or changed.
    """
    stamp = file_sha256(root / MANIFEST)
    before = (root / CHECKED).read_text() if (root / CHECKED).exists() else ""
    files = pack["files"]
    if before == stamp:
        files = {name: entry for name, entry in files.items() if name.startswith(f"{WHEELS}/")}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases the GIL
        problems = list(
            pool.map(lambda item: problem(root, *item, content=not item[0].endswith(".whl")), files.items())
        )
    report(problems)
    for name, entry in files.items():
        if entry["executable"] and not os.access(root / name, os.X_OK):  # browsers upload files without it
            (root / name).chmod(0o755)
    (root / CHECKED).write_text(stamp)


def problem(root: Path, name: str, entry: dict, content: bool) -> str:
    """Return what is wrong with a file of the pack, or ""; ``content``: whether to compare its content, too."""
    try:
        size = (root / name).stat().st_size
        if size == entry["size"]:
            same = not content or file_sha256(root / name) == entry["sha256"]
            return "" if same else f"{name} (different content)"
        return f"{name} ({size:,} of {entry['size']:,} bytes)"
    except FileNotFoundError:
        return f"{name} (missing)"
    except OSError as error:
        return f"{name} ({error.strerror})"


def report(problems: list[str]) -> None:
    """Raise a PackError that names the files that have problems, if there are any."""
    wrong = [each for each in problems if each]
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise PackError(
            f"this copy of the pack is incomplete or changed; copy it here again (rsync sends only the differences): "
            f"{', '.join(wrong[:SHOWN])}{more}"
        )


def install(root: Path, pack: dict, python: str) -> None:
    """Install the wheels of the pack, and the workshop itself, into ``.venv``; remove ``.venv`` if that fails.

    Raises:
        PackError: the disk is full, a wheel is not the one that was packed, or uv fails otherwise.
    """
    venv, work = root / ".venv", root / ".venv.work"
    shutil.rmtree(work, ignore_errors=True)  # left by an earlier start that was killed
    try:
        uv = take_uv(root, pack, work)
        # uv works in this folder, because $HOME and /tmp may be small or read-only, and ignores all settings on this machine.
        own = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
        own["TMPDIR"] = str(work)
        common = ["--quiet", "--no-config", "--offline", "--cache-dir", str(work / "cache")]
        into = ["--no-index", "--no-deps", "--python", str(venv / "bin" / "python")]
        for command in (
            ["venv", "--no-project", "--python", python, str(venv)],
            ["pip", "install", *into, "--find-links", WHEELS, "--require-hashes", "-r", REQUIREMENTS],
            ["pip", "install", *into, "--no-build-isolation", "-e", "."],
        ):
            done = subprocess.run([uv, *command, *common], cwd=root, env=own, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                if DISK_FULL.search(done.stderr):
                    raise PackError(full_sentence(root))
                report(
                    [
                        problem(root, name, entry, content=True)
                        for name, entry in pack["files"].items()
                        if ".whl" in name
                    ]
                )
                raise PackError(f"uv {' '.join(command[:2])} failed: {' '.join(done.stderr.split())}")
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def take_uv(root: Path, pack: dict, work: Path) -> str:
    """Unpack uv, which is a single program in its wheel, and return its path."""
    wheel = next(name for name in pack["files"] if name.startswith(f"{WHEELS}/uv-"))
    try:
        with zipfile.ZipFile(root / wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
            program = Path(archive.extract(member, work))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise PackError(f"{wheel} is incomplete: copy the pack here again") from error
    program.chmod(0o755)
    return str(program.resolve())


def full_sentence(root: Path) -> str:
    """Return the message for a disk that became full during the installation."""
    return f"the disk (or your quota) is full at {root}: free some space and start again, the installation begins anew"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
