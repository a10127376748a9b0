"""Fetch data sets and models for ``workshop fetch``."""

import sys

from workshop.data import chess, cifar10, codellama, mnist
from workshop.data.datasets import data_folder
from workshop.errors import UserError

KNOWN = {"mnist": mnist, "cifar10": cifar10}


def fetch_dataset(name: str, mirror: str | None = None, source: str = "", sha256: str = "") -> None:
    """Fetch the data set called ``name`` into the data folder and print what was done.

    Args:
        name: "mnist", "cifar10", "chess", "tiny-codellama" (created, not fetched) or "codellama".
        mirror: an address to fetch from instead of the known ones.
        source: the address or the path of a file of JSON lines, only for "chess".
        sha256: the expected SHA-256 of that file; "": accept any file.

    Raises:
        UserError: the name is unknown, the folder cannot be written, or no mirror gave the right files.
    """
    if name == chess.NAME:
        documents = chess.fetch(source, sha256)
        print(f"{name}: {documents:,} documents fetched into {chess.path()}")
        return
    if source or sha256:
        raise UserError(
            f"--from and --sha256 are only for {chess.NAME}; to fetch {name} from a different address, use --mirror"
        )
    if name == "digits":
        print("digits come with scikit-learn: there is nothing to fetch")
        return
    if name in (codellama.TINY, "codellama"):
        codellama.fetch(name, mirror)
        return
    if name not in KNOWN:
        raise UserError(
            f"'{name}' cannot be fetched; choose from: {', '.join(KNOWN)}, {chess.NAME}, {codellama.TINY}, codellama"
        )
    folder, known = data_folder(), KNOWN[name]
    print(f"fetching {name} into {folder}", file=sys.stderr)
    fetched = known.fetch(folder, (mirror,) if mirror else known.MIRRORS)
    print(f"{name}: {fetched} files fetched into {folder}" if fetched else f"{name} is already in {folder}")
