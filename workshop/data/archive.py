"""Downloading one file: it goes on where an interrupted download was, and counts only when it is the right one."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workshop.errors import UserError


@contextmanager
def download(name: str, sha256: str | None, mirrors, folder: Path) -> Iterator[Path]:
    """Download a file for the length of a with-block; of an interrupted download all that came stays, for the next one.

    Args:
        name: its name.
        sha256: what it has to have; None: whatever comes is right.
        mirrors: addresses of folders that hold it, tried in turn.
        folder: where it lies meanwhile, as ``.NAME.part``.

    Raises:
        UserError: no mirror gave a file with the right SHA-256.
        OSError: the folder cannot be written, or the disk is full.
    """
    import requests  # here: importing it takes a while, and training never needs it

    path = folder / f".{name}.part"
    with _alone(path):
        problems = []
        for mirror in mirrors:
            url = mirror.rstrip("/") + "/" + name
            try:
                go_on(url, path)
            except requests.HTTPError as error:
                problems.append(f"{url}: HTTP status {error.response.status_code}")
            except requests.RequestException as error:
                problems.append(f"{url}: {type(error).__name__}")
            else:
                if sha256 in (None, file_sha256(path)):
                    yield path
                    path.unlink()
                    return
                os.truncate(path, 0)
                problems.append(f"{url}: what came is not the file expected (SHA-256 differs)")
        stays = f"; what has come stays in {path}" if path.stat().st_size else ""
        if not stays:
            path.unlink()
        raise UserError(f"could not fetch {name}; " + "; ".join(problems) + stays)


def go_on(url: str, path: Path, headers: dict[str, str] | None = None, size: int | None = None) -> None:
    """Download a file, or what is missing of it.

    Args:
        url: its address.
        path: where it goes, and its beginning may lie.
        headers: further ones of the request.
        size: in bytes, for the progress bar; None: as the server says.

    Raises:
        requests.RequestException: the server does not answer, or breaks off.
        OSError: it cannot be written.
    """
    import requests
    from tqdm import tqdm

    there = path.stat().st_size if path.exists() else 0
    headers = {**(headers or {}), "Accept-Encoding": "identity"}  # a part of a compressed answer is no part of the file
    if there:
        headers["Range"] = f"bytes={there}-"
    with requests.get(url, headers=headers, stream=True, timeout=30) as answer:
        if there and answer.status_code == 416:  # Range Not Satisfiable: all of it is there
            return
        answer.raise_for_status()
        if answer.status_code != 206:  # not Partial Content: all of it comes
            there = 0
        size = size or there + int(answer.headers.get("Content-Length", 0)) or None
        bar = tqdm(total=size, initial=there, unit="B", unit_scale=True, disable=None)
        with open(path, "ab" if there else "wb") as file, bar:
            for chunk in answer.iter_content(2**13):
                file.write(chunk)
                bar.update(len(chunk))


def file_sha256(path: str | os.PathLike) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Make a file, and hold it alone: whoever else wants it waits."""
    while True:
        with open(path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                pass
            try:
                if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    continue
            except FileNotFoundError:  # whoever held it was done with it
                continue
            yield
            return
