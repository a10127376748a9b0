"""Fetch MNIST: four files that are verified and moved into place only when they are complete."""

import gzip
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from workshop.data.archive import download
from workshop.errors import UserError

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",  # the one torchvision uses
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


class Archive(NamedTuple):
    """One gzipped file: its name, the SHA-256 of the archive, the unpacked size in bytes."""

    name: str
    sha256: str
    size: int


ARCHIVES = (
    Archive(
        "train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 47_040_016
    ),
    Archive("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 60_008),
    Archive("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 7_840_016),
    Archive("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 10_008),
)


def _target(folder: Path, archive: Archive) -> Path:
    """Return the path where torchvision.datasets.MNIST looks for the file."""
    return folder / "MNIST" / "raw" / archive.name.removesuffix(".gz")


def missing_files(folder: Path) -> list[Archive]:
    """Return the files that are not in ``folder``, or do not have their full size."""
    targets = [(archive, _target(folder, archive)) for archive in ARCHIVES]
    return [archive for archive, target in targets if not target.is_file() or target.stat().st_size != archive.size]


def fetch(folder: Path, mirrors=MIRRORS) -> int:
    """Download the missing files of MNIST into ``folder`` and return the number of fetched files.

    Each archive is written under a temporary name, compared with its SHA-256, unpacked under a temporary name and moved into
    place. So a program sees either no file or the complete file, even if two people fetch at once or a fetch is interrupted. An
    interrupted download resumes.

    Args:
        folder: the data folder; created if necessary.
        mirrors: addresses of folders that contain the four archives, tried in turn.

    Raises:
        UserError: the folder cannot be written, or no mirror gave a file with the right SHA-256.
    """
    missing = missing_files(folder)
    for archive in missing:
        target = _target(folder, archive)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (
                download(archive.name, archive.sha256, mirrors, folder) as packed,
                tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch,
            ):
                unpacked = Path(scratch) / target.name
                with gzip.open(packed) as source, open(unpacked, "wb") as destination:
                    shutil.copyfileobj(source, destination)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(unpacked, target)
        except OSError as error:
            raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return len(missing)
