"""Download one file: resume an interrupted download, and verify the result."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workshop.errors import UserError


@contextmanager
def download(name: str, sha256: str | None, mirrors, folder: Path) -> Iterator[Path]:
    """Download a file for use in a with-block, then delete it. A later call resumes an interrupted download.

    Args:
        name: the name of the file.
        sha256: the expected SHA-256; None: accept any file.
        mirrors: addresses of folders that contain it, tried in turn.
        folder: where it is stored meanwhile, as ``.NAME.part``.

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
                problems.append(f"{url}: the downloaded file is not the expected one (SHA-256 differs)")
        stays = f"; the downloaded part stays in {path}" if path.stat().st_size else ""
        if not stays:
            path.unlink()
        raise UserError(f"could not fetch {name}; " + "; ".join(problems) + stays)


def go_on(url: str, path: Path, headers: dict[str, str] | None = None, size: int | None = None) -> None:
    """Download a file, or resume its download.

    Args:
        url: the address of the file.
        path: the file to write; it may already contain the beginning.
        headers: additional headers of the request.
        size: in bytes, for the progress bar; None: the size that the server reports.

    Raises:
        requests.RequestException: the server does not answer, or closes the connection.
        OSError: the file cannot be written.
    """
    import requests
    from tqdm import tqdm

    there = path.stat().st_size if path.exists() else 0
    headers = {**(headers or {}), "Accept-Encoding": "identity"}  # a compressed range would not continue the file
    if there:
        headers["Range"] = f"bytes={there}-"
    with requests.get(url, headers=headers, stream=True, timeout=30) as answer:
        if there and answer.status_code == 416:  # Range Not Satisfiable: the file is complete
            return
        answer.raise_for_status()
        if answer.status_code != 206:  # not Partial Content: the whole file comes
            there = 0
        size = size or there + int(answer.headers.get("Content-Length", 0)) or None
        bar = tqdm(total=size, initial=there, unit="B", unit_scale=True, disable=None)
        with open(path, "ab" if there else "wb") as file, bar:
            for chunk in answer.iter_content(2**13):
                file.write(chunk)
                bar.update(len(chunk))


def file_sha256(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Create a file and lock it; other processes wait for the lock."""
    while True:
        with open(path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                pass
            try:
                if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    continue
            except FileNotFoundError:  # the previous process finished and deleted it
                continue
            yield
            return
