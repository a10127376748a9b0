"""Fetch CIFAR-10: download and verify one archive, unpack it under a temporary name and move it into place."""

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from workshop.data.archive import download
from workshop.errors import UserError

MIRRORS = (
    "https://www.cs.toronto.edu/~kriz/",  # its author's; the one torchvision uses
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
)
ARCHIVE = "cifar-10-python.tar.gz"
SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
FOLDER = "cifar-10-batches-py"  # in the archive, and where torchvision.datasets.CIFAR10 looks
FILES = ("batches.meta", *(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def missing_files(folder: Path) -> list[str]:
    """Return the files that are not in ``folder``."""
    return [name for name in FILES if not (folder / FOLDER / name).is_file()]


def fetch(folder: Path, mirrors=MIRRORS) -> int:
    """Download CIFAR-10 (163 MiB) into ``folder`` if it is not there, and return the number of fetched files.

    Args:
        folder: the data folder; created if necessary.
        mirrors: addresses of folders that contain the archive, tried in turn.

    Raises:
        UserError: the folder cannot be written, or no mirror gave an archive with the right SHA-256.
    """
    if not missing_files(folder):
        return 0
    target = folder / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            download(ARCHIVE, SHA256, mirrors, folder) as packed,
            tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch,
        ):
            with tarfile.open(packed) as archive:
                members = [archive.getmember(f"{FOLDER}/{name}") for name in FILES]
                archive.extractall(scratch, members, filter="data")
            shutil.rmtree(target, ignore_errors=True)  # the remains of an interrupted attempt
            os.replace(Path(scratch) / FOLDER, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return len(FILES)
