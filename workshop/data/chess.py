"""Fetch chess games as text for ``--data chess`` of stage 04: a file of JSON lines that you provide."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from workshop.data.archive import download, file_sha256
from workshop.data.datasets import data_folder
from workshop.errors import UserError

NAME = "chess"


def path() -> Path:
    """Return the path of the file, which exists once it has been fetched."""
    return data_folder() / f"{NAME}.jsonl"


def fetched_file() -> Path:
    """Return the path of the fetched file.

    Raises:
        UserError: the file has not been fetched.
    """
    if not path().is_file():
        raise UserError(
            f"--data {NAME}: it is not in {path().parent}; fetch it once with: ./workshop.sh fetch {NAME} --from URL-or-file"
        )
    return path()


def text_of(line: bytes) -> str:
    """Return the document in a line of JSON.

    Raises:
        ValueError: the line is not a JSON object with a string as its "text".
    """
    entry = json.loads(line)
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise ValueError('no JSON object with a "text"')
    return entry["text"]


def fetch(source: str, sha256: str = "") -> int:
    """Download or copy a file of JSON lines into the data folder, and return the number of documents in it.

    The file appears only when it is complete and every line is valid. An interrupted download resumes.

    Args:
        source: the address of the file, or its path on this machine.
        sha256: the expected SHA-256, as hexadecimal digits; "": accept any file.

    Raises:
        UserError: there is no such file, it is not the expected one, a line is not valid, or the folder cannot be written.
    """
    if not source:
        raise UserError(
            f"{NAME} has no public address; give the address or the path of your file of JSON lines: "
            f"./workshop.sh fetch {NAME} --from URL-or-file"
        )
    sha256 = sha256.lower()
    if sha256 and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise UserError(f"--sha256 {sha256}: a SHA-256 has 64 hexadecimal digits")
    folder = path().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not re.match("https?://", source):
            if sha256 and file_sha256(source) != sha256:
                raise UserError(f"--from {source} is not the expected file (SHA-256 differs)")
            return _put_in_place(Path(source), source)
        mirror, _, name = source.rpartition("/")
        with download(name, sha256 or None, [mirror], folder) as arrived:
            try:
                return _put_in_place(arrived, source)
            except UserError:
                os.truncate(arrived, 0)  # the next download starts from the beginning
                raise
    except OSError as error:
        raise UserError(f"cannot fetch {source} into {folder}: {error.strerror or error}") from error


def _put_in_place(file: Path, source: str) -> int:
    """Copy a file into place if every line is valid, and return the number of documents in it."""
    with tempfile.TemporaryDirectory(dir=path().parent, prefix=".fetch-") as scratch:
        copy = Path(scratch) / path().name
        shutil.copyfile(file, copy)
        documents = _count_documents(copy, source)
        os.replace(copy, path())
    return documents


def _count_documents(file: Path, source: str) -> int:
    """Return the number of documents in a file of JSON lines; empty lines do not count."""
    documents = 0
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    text_of(line)
                except ValueError as error:
                    raise UserError(
                        f'line {number:,} of {source} is not a JSON object with a "text"; the stored {NAME} data has not changed'
                    ) from error
                documents += 1
    if not documents:
        raise UserError(f"there is no document in {source}")
    return documents
