"""Make the environment from a pack, without any network: ``workshop.sh`` runs this file where it finds a ``pack.json``.

It uses Python's standard library alone, and nothing of the workshop: no package is there yet.
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
CHECKED = ".pack_checked"  # the manifest whose files were found whole here: from then on they are the learner's
SHOWN = 20  # files that a message names
# Errno 28: no space left. 122: the quota is used up.
DISK_FULL = re.compile(r"errno (28|122)\b|os error (28|122)\b|no space left|quota exceeded", re.IGNORECASE)
IDENTITY = "import platform, sys; print(sys.implementation.name, *sys.version_info[:2], platform.machine())"


class PackError(Exception):
    """What one sentence explains: shown on standard error, exit status 2."""


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
    """Check that the pack in ``root`` is whole and fits this machine, and install its wheels into ``.venv`` there.

    Raises:
        PackError: it is not whole, is for another machine or Python, the disk is too small, or a wheel cannot be installed.
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
            f"the environment needs {pack['installed_size'] / 1e9:.1f} GB in {root}, where {free / 1e9:.1f} GB are free"
        )
    print(
        f"workshop.sh: making the environment in .venv from the pack, without network ({len(pack['versions'])} packages, "
        f"{pack['installed_size'] / 1e9:.1f} GB)",
        file=sys.stderr,
    )
    install(root, pack, python)
    print(
        f"workshop.sh: checked in {checked - start:.1f} s, installed in {time.monotonic() - checked:.1f} s",
        file=sys.stderr,
    )


def read_manifest(root: Path) -> dict:
    """What ``workshop pack`` has written about the pack in ``root``.

    Raises:
        PackError: it is not whole.
    """
    try:
        pack = json.loads((root / MANIFEST).read_text())
        return {name: pack[name] for name in ("platform", "python", "glibc", "versions", "installed_size", "files")}
    except (OSError, ValueError, KeyError) as error:
        raise PackError(f"{root / MANIFEST} is not whole: copy the pack here once more") from error


def find_python(pack: dict) -> str:
    """The path of a Python that the pack's wheels are for: this one, or another one on the PATH.

    Raises:
        PackError: this machine is another one, or there is no such Python.
    """
    machine, here = platform.machine(), "{}.{}".format(*sys.version_info[:2])
    libc = os.confstr("CS_GNU_LIBC_VERSION") if sys.platform == "linux" else ""  # "glibc 2.36"; "" or None with musl
    version = tuple(int(part) for part in re.findall(r"\d+", libc or "")[:2])
    wanted = f"this pack is for {pack['platform']} and Python {pack['python']}"
    if sys.platform != "linux" or machine != pack["platform"]:
        raise PackError(
            f"{wanted}, here is {machine} and Python {here} on {sys.platform}: pack it again, on a machine with internet, "
            f"with --platform {machine}"
        )
    if version < tuple(int(part) for part in pack["glibc"].split(".")):
        raise PackError(f"{wanted} on Linux with glibc {pack['glibc']} or newer, here is {libc or 'another C library'}")
    for name in (sys.executable, f"python{pack['python']}", "python3", "python"):
        path = shutil.which(name)
        if path and identity(path) == f"cpython {pack['python'].replace('.', ' ')} {machine}":
            return path
    raise PackError(
        f"{wanted}, here is {machine} and Python {here}: put python{pack['python']} on the PATH (a cluster: module load "
        f"python), or pack it again, on a machine with internet, with --python {here}"
    )


def identity(python: str) -> str:
    """What a Python says it is; nothing where it does not run (a name that only stands in for one)."""
    try:
        done = subprocess.run([python, "-I", "-c", IDENTITY], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def check_files(root: Path, pack: dict) -> None:
    """Compare what lies in ``root`` with what was packed; once all of it was right, the wheels only.

    The wheels' content is left to uv, which reads them anyway and knows their SHA-256.

    Raises:
        PackError: it names the files that are missing, cut short or changed.
    """
    stamp = file_sha256(root / MANIFEST)
    before = (root / CHECKED).read_text() if (root / CHECKED).exists() else ""
    files = pack["files"]
    if before == stamp:
        files = {name: entry for name, entry in files.items() if name.startswith(f"{WHEELS}/")}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing leaves Python's lock alone
        problems = list(
            pool.map(lambda item: problem(root, *item, content=not item[0].endswith(".whl")), files.items())
        )
    report(problems)
    for name, entry in files.items():
        if entry["executable"] and not os.access(root / name, os.X_OK):  # an upload by browser loses that
            (root / name).chmod(0o755)
    (root / CHECKED).write_text(stamp)


def problem(root: Path, name: str, entry: dict, content: bool) -> str:
    """What is wrong with a file of the pack; "": nothing. Its content is only looked at on demand."""
    try:
        size = (root / name).stat().st_size
        if size == entry["size"]:
            same = not content or file_sha256(root / name) == entry["sha256"]
            return "" if same else f"{name} (other content)"
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
            f"this copy of the pack is not whole, copy it here once more (rsync sends only what differs): "
            f"{', '.join(wrong[:SHOWN])}{more}"
        )


def install(root: Path, pack: dict, python: str) -> None:
    """Install the pack's wheels, and the workshop itself, into ``.venv``; nothing of it stays if that fails.

    Raises:
        PackError: the disk is full, a wheel is not the one that was packed, or uv has another reason.
    """
    venv, work = root / ".venv", root / ".venv.work"
    shutil.rmtree(work, ignore_errors=True)  # an earlier start was killed
    try:
        uv = take_uv(root, pack, work)
        # In this folder, not in $HOME or /tmp: those may be small, or not to be written. No settings of this machine's count.
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
    """Unpack the installer, which is a single program in its wheel, and return its path."""
    wheel = next(name for name in pack["files"] if name.startswith(f"{WHEELS}/uv-"))
    try:
        with zipfile.ZipFile(root / wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
            program = Path(archive.extract(member, work))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise PackError(f"{wheel} is not whole: copy the pack here once more") from error
    program.chmod(0o755)
    return str(program.resolve())


def full_sentence(root: Path) -> str:
    """What is said when there was no room half way."""
    return f"the disk (or your quota) is full at {root}: make room and start again, the environment is made anew"


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
