"""``workshop pack``: collect everything for a machine without internet in one folder, from which ``unpack.py`` installs it."""

import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from workshop.data import chess, cifar10, codellama
from workshop.data.archive import file_sha256
from workshop.data.datasets import data_folder
from workshop.data.fetch import fetch_dataset
from workshop.errors import UserError
from workshop.repository import ROOT
from workshop.run.environment import without_launcher
from workshop.ship.unpack import DISK_FULL, MANIFEST, REQUIREMENTS, WHEELS

# The path of each data set and model in the data folder.
DATA = {"mnist": "MNIST/raw", "cifar10": cifar10.FOLDER, chess.NAME: f"{chess.NAME}.jsonl"}
MODELS = {codellama.TINY: f"models/{codellama.TINY}", "codellama": f"models/{codellama.REPOSITORY.split('/')[1]}"}
PLATFORMS = ("x86_64", "aarch64")
# The newest C library that a wheel may need. Red Hat Enterprise Linux 8 (2018) and its derivatives have this version.
GLIBC = "2.28"
PLATFORM_TAGS = (
    *(f"manylinux_2_{minor}" for minor in range(28, 4, -1)),
    "manylinux2014",
    "manylinux2010",
    "manylinux1",
)
# Packages without wheels on the index. They are built here, so their wheels must run on any machine.
FROM_SOURCE = ("deepspeed",)
BATCH = 8  # wheels that pip downloads at a time; an interrupted pack downloads at most this number again
PACKAGE_SIZE = 26e6  # bytes, on average: 3.4 GB for 170 packages, and room for a second copy of a batch
# The lock may have two versions of a package, for older and newer micro versions of Python: the pack contains both.
MICRO_VERSIONS = ("0", "99")


class Package(NamedTuple):
    """A line of the lock: name, version, the marker that says where it is needed ("": everywhere), and the accepted SHA-256."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"


class Target(NamedTuple):
    """The machine that the pack is for: its processor, and its Python as "3.11"."""

    platform: str
    python: str

    def needs(self, package: Package) -> bool:
        """Return whether this machine needs the package, for any micro version of its Python."""
        from packaging.markers import Marker

        environment = {
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": self.platform,
            "platform_release": "",
            "platform_version": "",
            "platform_python_implementation": "CPython",
            "implementation_name": "cpython",
            "python_version": self.python,
            "extra": "",
        }
        versions = [f"{self.python}.{micro}" for micro in MICRO_VERSIONS]
        return not package.marker or any(
            Marker(package.marker).evaluate(
                {**environment, "python_full_version": version, "implementation_version": version}
            )
            for version in versions
        )

    def tags(self) -> set:
        """Return the tags of the wheels that fit this machine."""
        from packaging.tags import compatible_tags, cpython_tags

        version = tuple(int(part) for part in self.python.split("."))
        platforms = [f"{tag}_{self.platform}" for tag in PLATFORM_TAGS]
        interpreter = f"cp{''.join(map(str, version))}"
        return {*cpython_tags(version, platforms=platforms), *compatible_tags(version, interpreter, platforms)}


def run_pack(
    folder: str, data: str = "", models: str = "", processor: str | None = None, python: str | None = None
) -> None:
    """Collect the repository, data, and the wheels of ``requirements.lock`` in a folder, and print what it contains.

    The files are collected in ``FOLDER.part``, which is renamed when it is complete; after an interruption, packing continues
    there. An existing pack is updated.

    Args:
        folder: the folder of the pack.
        data: data sets, separated by commas; downloaded if necessary.
        models: models, likewise.
        processor: the processor that the pack is for, "x86_64" or "aarch64"; None: that of this machine.
        python: the Python that the pack is for, as "3.11"; None: this one.

    Raises:
        UserError: a name is unknown, the folder is not a pack, a package has no wheel for that Python, the disk is full, pip
            or git is missing, or the package index cannot be reached.
    """
    target = Target(processor or platform.machine(), python or "{}.{}".format(*sys.version_info[:2]))
    places = [*_places("--data", data, DATA), *_places("--model", models, MODELS)]
    _require_target(target)
    if find_spec("pip") is None:
        raise UserError(
            f"{sys.executable} has no pip, which downloads wheels: pip install 'distributed-pytorch-workshop[pack]'"
        )
    final = Path(os.path.abspath(folder))
    part = final.with_name(f"{final.name}.part")
    try:
        with _begin(final, part):
            for name, _ in places:
                if name != chess.NAME:
                    fetch_dataset(name)
            files = _repository_files()
            files |= {f"data/{name}": path for _, place in places for name, path in _files_below(place)}
            packages = [package for package in read_lock(ROOT / "requirements.lock") if target.needs(package)]
            _require_space(part, files, packages)
            print(f"packing {len(files)} files and {len(packages)} packages into {part}", file=sys.stderr)
            for name, source in files.items():
                _copy(source, part / name)
            wheels = _collect_wheels(packages, target, part)
            size = _write_manifest(part, files, packages, wheels, target)
            os.rename(part, final)
    except OSError as error:
        raise UserError(
            _disk_sentence(part) if DISK_FULL.search(str(error)) else f"cannot write {part}: {error}"
        ) from error
    print(
        f"{final}: {len(files)} files and {len(wheels)} packages, {size / 1e9:.1f} GB, for {target.platform} and Python "
        f"{target.python}. Copy it to the other machine (OFFLINE.md says how) and run ./workshop.sh there"
    )


def _places(option: str, names: str, known: dict[str, str]) -> list[tuple[str, str]]:
    """Return the names that an option selects, and their paths in the data folder."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise UserError(f"{option} {unknown[0]}: choose from: {', '.join(known)}")
    if chess.NAME in chosen:
        chess.fetched_file()  # fails if the file is missing, because pack cannot download it
    return [(name, known[name]) for name in chosen]


def _require_target(target: Target) -> None:
    from packaging.specifiers import SpecifierSet

    if target.platform not in PLATFORMS:
        raise UserError(
            f"packs are for Linux on {' or '.join(PLATFORMS)}, not {target.platform}: name one with --platform"
        )
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    if not re.fullmatch(r"3\.\d+", target.python) or not SpecifierSet(allowed).contains(f"{target.python}.99"):
        raise UserError(f"--python {target.python}: the workshop needs Python {allowed}; write it like 3.11")


@contextmanager
def _begin(final: Path, part: Path) -> Iterator[None]:
    """Create the folder in which the pack is collected, and lock it against other processes."""
    if final.is_symlink() or final.exists():
        if not (final / MANIFEST).is_file():
            raise UserError(f"{final} exists and is not a pack: name a different folder, or remove it")
        if (final / ".venv").exists() or part.exists():
            other = f"beside an unfinished {part.name}" if part.exists() else "in use here"
            raise UserError(f"{final} is a pack {other}: name a different folder, or remove it")
        os.rename(final, part)
    part.mkdir(parents=True, exist_ok=True)
    held = os.open(part, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"a different process is packing into {part}") from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(held)


def _repository_files() -> dict[str, Path]:
    """Return the files that git tracks, in their current state, by their names in the repository."""
    done = _git("ls-files", "-z")
    return {name: ROOT / name for name in done.split("\0") if (ROOT / name).is_file()}


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"git does not run ({error.strerror}); pack needs it to list its files") from error
    if done.returncode:
        raise UserError(f"git cannot list the files of the workshop in {ROOT}: {done.stderr}")
    return done.stdout


def _files_below(place: str) -> list[tuple[str, Path]]:
    """Return the files of a data set or model, with their names in the data folder."""
    top = data_folder() / place
    paths = [top] if top.is_file() else [path for path in sorted(top.rglob("*")) if path.is_file()]
    return [(str(path.relative_to(data_folder())), path) for path in paths]


def read_lock(path: Path) -> list[Package]:
    """Return the packages in a lock file that uv has written."""
    from packaging.requirements import Requirement

    packages = []
    for line in path.read_text().replace("\\\n", "").splitlines():
        words, *hashes = re.split(r"\s+--hash=sha256:", line.strip())
        if words and not words.startswith("#"):
            requirement = Requirement(words)
            version = next(iter(requirement.specifier)).version
            packages.append(Package(requirement.name, version, str(requirement.marker or ""), tuple(hashes)))
    return packages


def _require_space(part: Path, files: dict[str, Path], packages: list[Package]) -> None:
    sizes = {part / name: path.stat().st_size for name, path in files.items()}
    there = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
    needed, free = sum(sizes.values()) + PACKAGE_SIZE * len(packages) - there, shutil.disk_usage(part).free
    if free < needed:
        raise UserError(f"{part} needs about {needed / 1e9:.1f} GB more, but only {free / 1e9:.1f} GB are free")


def _copy(source: Path, target: Path) -> None:
    """Copy a file, unless it is there already; the target appears only when the copy is complete."""
    status = source.stat()
    if target.exists():
        there = target.stat()
        if (there.st_size, there.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.part")
    shutil.copy2(source, scratch)
    os.replace(scratch, target)


def _collect_wheels(packages: list[Package], target: Target, part: Path) -> dict[Package, tuple[str, str]]:
    """Put a wheel of each package into the pack, and return their file names and SHA-256."""
    from tqdm import tqdm

    folder, scratch = part / WHEELS, part / ".tmp"
    folder.mkdir(exist_ok=True)
    there = _wheels(packages, target, folder)
    missing = [package for package in packages if package not in there]
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()  # so that pip's temporary files are on this disk too
    with tqdm(total=len(missing), unit=" wheels", disable=None) as bar:
        for batch in _batches(missing):
            requirements = scratch / "batch.txt"
            hashes = [" ".join(f"--hash=sha256:{digest}" for digest in package.hashes) for package in batch]
            requirements.write_text("".join(f"{p.pin} {each}\n" for p, each in zip(batch, hashes, strict=True)))
            _pip(target, scratch, folder, requirements, build=batch[0].name in FROM_SOURCE)
            bar.update(len(batch))
    shutil.rmtree(scratch)
    wheels = _wheels(packages, target, folder)
    for package in packages:
        if package not in wheels:
            raise UserError(f"the wheel of {package.pin} that was built here is not for {target.platform}")
    return wheels


def _batches(packages: list[Package]) -> Iterator[list[Package]]:
    """Yield groups of packages, one per run of pip: no package twice in a group, and each package from source alone."""
    batch = []
    for package in packages:
        alone = any(each.name in FROM_SOURCE for each in (package, *batch))
        if batch and (len(batch) == BATCH or alone or package.name in [each.name for each in batch]):
            yield batch
            batch = []
        batch.append(package)
    if batch:
        yield batch


def _pip(target: Target, scratch: Path, folder: Path, requirements: Path, build: bool) -> None:
    """Download the wheels of these requirements, or build them.

    Raises:
        UserError: there is no wheel for the target, the index cannot be reached, the disk is full, or pip fails otherwise.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "wheel" if build else "download",
        "--quiet",
        "--no-input",
        "--no-deps",
    ]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--require-hashes", "--ignore-requires-python"]
    command += ["--requirement", str(requirements)]
    if build:
        command += ["--wheel-dir", str(folder)]
    else:
        command += [
            "--dest",
            str(folder),
            "--only-binary=:all:",
            "--implementation=cp",
            f"--python-version={target.python}",
        ]
        command += [f"--platform={tag}_{target.platform}" for tag in PLATFORM_TAGS]
    # DS_BUILD_OPS: DeepSpeed compiles its operations when they are used, not now.
    environment = without_launcher(os.environ) | {"TMPDIR": str(scratch), "DS_BUILD_OPS": "0"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return
    if DISK_FULL.search(done.stderr):
        raise UserError(_disk_sentence(folder.parent))
    none = re.search(r"No matching distribution found for (\S+)", done.stderr)
    reached = not re.search(r"connection broken|timed out|Connection|IncompleteRead", done.stderr)
    if none and reached:
        raise UserError(
            f"there is no wheel of {none[1]} (in requirements.lock) for Python {target.python} on {target.platform}"
        )
    errors = [line for line in done.stderr.splitlines() if "WARNING" not in line] or [f"status {done.returncode}"]
    failed = "pip failed" if reached else "the package index cannot be reached, or the connection broke"
    raise UserError(f"{failed} ({errors[-1]}); the downloads stay in {folder.parent}, start again to continue")


def _wheels(packages: list[Package], target: Target, folder: Path) -> dict[Package, tuple[str, str]]:
    """Return the name and the SHA-256 of each package's wheel in the folder; remove all other and incomplete wheels."""
    from packaging.utils import parse_wheel_filename

    wanted, tags, found = {package.pin: package for package in packages}, target.tags(), {}
    paths = [path for path in folder.iterdir() if path.suffix == ".whl"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = list(pool.map(file_sha256, paths))
    for path, digest in zip(paths, digests, strict=True):
        name, version, _, its_tags = parse_wheel_filename(path.name)
        package = wanted.get(f"{name}=={version}")
        built = package and package.name in FROM_SOURCE and zipfile.is_zipfile(path)
        if package and (built or digest in package.hashes) and its_tags & tags:
            found[package] = (path.name, digest)
        else:
            path.unlink()
    return found


def _write_manifest(part: Path, files: dict, packages: list[Package], wheels: dict, target: Target) -> int:
    """Write the list of requirements and the manifest; return the size of the pack in bytes."""
    lines = []
    for package in packages:
        marker = f" ; {package.marker}" if package.marker else ""
        lines.append(f"{package.pin}{marker} --hash=sha256:{wheels[package][1]}\n")
    (part / REQUIREMENTS).write_text("".join(lines))
    names = [*files, REQUIREMENTS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = dict(zip(names, pool.map(lambda name: file_sha256(part / name), names), strict=True))
    digests |= {f"{WHEELS}/{name}": digest for name, digest in wheels.values()}
    entries, installed = {}, 0
    for name, digest in sorted(digests.items()):
        status = (part / name).stat()
        entries[name] = {"size": status.st_size, "sha256": digest, "executable": bool(status.st_mode & 0o100)}
        if name.endswith(".whl"):
            with zipfile.ZipFile(part / name) as archive:  # files take whole blocks of the disk
                installed += sum(-(-member.file_size // 4096) * 4096 for member in archive.infolist())
    if (part / MANIFEST).exists():  # an existing pack: remove what is no longer part of it
        for name in json.loads((part / MANIFEST).read_text())["files"].keys() - entries.keys():
            (part / name).unlink(missing_ok=True)
    manifest = {
        "platform": target.platform,
        "python": target.python,
        "glibc": GLIBC,
        "repository": _git("describe", "--always", "--dirty").strip(),
        "versions": {package.name: package.version for package in packages},
        "installed_size": installed,
        "files": entries,
    }
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return sum(entry["size"] for entry in entries.values())


def _disk_sentence(part: Path) -> str:
    return f"the disk (or your quota) is full at {part}: free some space and start again, packing continues there"
