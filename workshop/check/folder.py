"""A copy of the folder of a program, in which a run may write without changing the original.

Small files are copied. Large ones, such as data, are links until the program opens them for writing.
"""

import ctypes
import fcntl
import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path

LARGE = 1_000_000  # bytes
COPIED = 200_000_000  # bytes of small files; more become links
AROUND = 5  # folders around that of a program whose entries it can see
BESIDE = 1000  # entries in each of them
ENTRIES = 20_000  # in all folders; folders after that become links
SKIPPED = {".git", "__pycache__", "node_modules", ".ipynb_checkpoints"}


def user_cache() -> str:
    """Return the folder for the caches of this user."""
    return os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


def extensions() -> str:
    """Return the folder of extensions that torch compiles, as DeepSpeed's: each run would compile for a minute without it."""
    return os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(user_cache(), "torch_extensions")


def own_caches(folder: Path) -> dict[str, str]:
    """Link the owner's downloaded models and data sets into a folder; return the environment variables that name them there."""
    variables: dict[str, str] = {}
    for name, usual in (("HF_HOME", "huggingface"), ("TORCH_HOME", "torch")):
        place = os.environ.get(name) or os.path.join(user_cache(), usual)
        if os.path.isdir(place):
            copy = folder / f"of-owner-{usual}"
            if not copy.exists():
                _link_files(os.path.realpath(place), copy)
            variables[name] = str(copy)
    return variables


def _link_files(original: str, copy: Path) -> None:
    """Make folders with links to files. (A lock resolves links of folders before it makes its file, so it would be outside.)"""
    entries = 0
    for folder, folders, files in os.walk(original):
        target = copy / os.path.relpath(folder, original)
        target.mkdir(parents=True, exist_ok=True)
        entries += len(folders) + len(files)
        for name in (*files, *(folders if entries > ENTRIES else ())):
            (target / name).symlink_to(os.path.realpath(os.path.join(folder, name)))
        folders[:] = [] if entries > ENTRIES else folders


def surroundings(original: Path) -> list[Path]:
    """Return the folders around that of a program, the nearest first: at most ``AROUND``, and none above the home folder."""
    found: list[Path] = []
    for folder in itertools.islice(original.parents, AROUND):
        if found and (found[-1] == Path.home() or folder == Path(folder.anchor)):
            break
        found.append(folder)
    return found


def copy_in_surroundings(original: Path, base: Path) -> Path:
    """Copy a folder below ``base``, with links to what is beside it and beside the folders around it, for ``../../data``.

    Returns:
        The copy.
    """
    place = base
    for outer, inner in itertools.pairwise([*reversed(surroundings(original)), original]):
        place.mkdir(exist_ok=True)
        with suppress(OSError):  # the owner may not list it
            for beside in itertools.islice(outer.iterdir(), BESIDE):
                if beside.name != inner.name and not base.is_relative_to(beside):
                    (place / beside.name).symlink_to(beside)
        place = place / inner.name
    place = place if original.name else base / "copy"
    copy_folder(original, place)
    return place


def top_of(copy: Path, original: Path) -> Path:
    """Return the ``base`` of the copy of a folder."""
    return copy.parents[max(0, len(surroundings(original)) - 1)]


def copy_folder(original: Path, copy: Path) -> None:
    """Fill a new folder ``copy`` with the contents of a folder, without virtual environments and version control."""
    entries = copied = 0
    pending = [original]
    copy.mkdir(parents=True, exist_ok=True)
    while pending:
        folder = pending.pop()
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            target = copy / Path(entry.path).relative_to(original)
            entries += 1
            if copy.is_relative_to(entry.path):
                continue  # the folder for temporary files is in that of the program
            if entry.is_dir(follow_symlinks=False):
                if entry.name in SKIPPED or os.path.exists(f"{entry.path}/pyvenv.cfg"):
                    continue
                if entries > ENTRIES:
                    target.symlink_to(os.path.realpath(entry.path))
                    continue
                target.mkdir()
                pending.append(Path(entry.path))
            elif entry.is_file():
                size = entry.stat().st_size
                if size > LARGE or copied + size > COPIED or entry.is_symlink() or not os.access(entry.path, os.R_OK):
                    target.symlink_to(os.path.realpath(entry.path))
                else:
                    shutil.copy2(entry.path, target)
                    copied += size
            elif entry.is_dir():
                target.symlink_to(os.path.realpath(entry.path))


def make_own(path: str, copy: str, lock: str) -> None:
    """Replace the links to originals in a path below ``copy`` by copies, before the program writes there.

    Args:
        path: an absolute path.
        copy: the folder of the run.
        lock: a file; only one process at a time changes links.
    """
    parts = os.path.relpath(path, copy).split(os.sep)
    places = [os.path.join(copy, *parts[: number + 1]) for number in range(len(parts))]
    # A place that does not exist may be one that another process is replacing at this moment.
    if parts[0] == os.pardir or all(os.path.exists(place) and not os.path.islink(place) for place in places):
        return
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for place in filter(os.path.islink, places):
            source, new = os.path.realpath(place), f"{place}.copy-{os.getpid()}"
            if os.path.isdir(source):
                os.mkdir(new)
                for entry in os.scandir(source):
                    os.symlink(entry.path, os.path.join(new, entry.name))
                _exchange(new, place)
            elif os.path.isfile(source):
                shutil.copy2(source, new)
                os.replace(new, place)


def _exchange(folder: str, link: str) -> None:
    """Put a folder in the place of a link, so that a process which reads there always finds one of them, and delete the link."""
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2() on Linux
    names = folder.encode(errors="surrogateescape"), link.encode(errors="surrogateescape")
    if ctypes.CDLL(None).renameat2(here, names[0], here, names[1], exchange) == 0:
        os.unlink(folder)  # it is the link now
    else:  # a few file systems cannot exchange
        os.unlink(link)
        os.replace(folder, link)


def special_files(folder: str, names: list[str]) -> list[str]:
    """The entries that cannot be copied, such as sockets."""
    paths = [os.path.join(folder, name) for name in names]
    return [
        os.path.basename(path)
        for path in paths
        if not (os.path.islink(path) or os.path.isfile(path) or os.path.isdir(path))
    ]
