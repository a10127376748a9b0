"""Load text for a language model as blocks of tokens: the source of Python's standard library, or a file of JSON lines."""

import hashlib
import os
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from workshop.data import chess
from workshop.data.datasets import data_folder
from workshop.errors import UserError

LIBRARY = "stdlib"
VALIDATION = 10  # one in this number of documents is for validation


def library_files() -> list[Path]:
    """Return the modules of Python's standard library, without its packages: about 170 files and 4.7 MB of source."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


class Blocks(Dataset):
    """A data set of consecutive blocks of ``sequence_length`` tokens from a file of tokens, each an int64 tensor.

    Args:
        path: the file, as ``numpy.save`` wrote it; it is mapped into memory, not read.
        sequence_length: tokens per block. The rest at the end of the file is not used.
    """

    def __init__(self, path: Path, sequence_length: int):
        tokens = np.load(path, mmap_mode="r")
        count = len(tokens) // sequence_length
        self.blocks = tokens[: count * sequence_length].reshape(count, sequence_length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.blocks[index].astype(np.int64))


def load_blocks(data: str, tokenizer, sequence_length: int, skip_broken: bool = False) -> tuple[Blocks, Blocks]:
    """Return the blocks for training and the blocks for validation. No document is in both.

    The tokens are stored in the data folder, so only the first run with this tokenizer and this text computes them.

    Args:
        data: "stdlib"; "chess", once it has been fetched; or the path of a file of JSON lines, each an object with the document
            as its "text".
        tokenizer: a fast tokenizer of Hugging Face ``transformers``.
        sequence_length: tokens per block.
        skip_broken: skip lines that cannot be read.

    Raises:
        UserError: the file cannot be read, one of its lines is not valid, or it is too short for one block of each kind.
    """
    paths = library_files() if data == LIBRARY else [chess.fetched_file() if data == chess.NAME else Path(data)]
    name = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(
                f"--data {data}: {error.strerror} (a file of JSON lines, {LIBRARY} or {chess.NAME})"
            ) from error
        name.update(f"{path.absolute()} {status.st_size} {status.st_mtime_ns} {skip_broken}".encode())
    folder = data_folder() / "tokens"
    files = [folder / f"{name.hexdigest()[:16]}-{part}.npy" for part in ("train", "validation")]
    if not all(file.exists() for file in files):
        documents = [path.read_text(errors="replace") for path in paths] if data == LIBRARY else None
        documents = documents or read_documents(paths[0], skip_broken)
        _write_tokens(files, documents, tokenizer)
    train_set, validation_set = (Blocks(file, sequence_length) for file in files)
    if not len(train_set) or not len(validation_set):
        raise UserError(
            f"--data {data}: too short for a block of {sequence_length:,} tokens to train on and one to validate with"
        )
    return train_set, validation_set


def read_documents(path: Path, skip_broken: bool = False) -> list[str]:
    """Read the documents of a file of JSON lines; empty lines do not count.

    Raises:
        UserError: a line is not a JSON object with a string as its "text" and ``skip_broken`` is false, or no document is left.
    """
    documents, broken = [], []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    documents.append(chess.text_of(line))
                except ValueError:
                    broken.append(number)
    except OSError as error:
        raise UserError(f"--data {path}: {error.strerror}") from error
    if broken and not skip_broken:
        shown = ", ".join(f"{number:,}" for number in broken[:5]) + (" ..." if len(broken) > 5 else "")
        raise UserError(
            f'--data {path}: no JSON object with a "text" in line{"s" * (len(broken) > 1)} {shown} '
            f"({len(broken):,} of {len(broken) + len(documents):,}); repair them, or leave them out with --skip-broken"
        )
    if not documents:
        raise UserError(f"--data {path}: there is no document in it")
    return documents


def _write_tokens(files: list[Path], documents: list[str], tokenizer) -> None:
    """Write the tokens of the documents, with an end-of-sequence token after each document."""
    encoded = [each.ids for each in tokenizer.backend_tokenizer.encode_batch(documents, add_special_tokens=False)]
    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for file, validation in zip(files, (False, True), strict=True):
            chosen = [
                tokens for number, tokens in enumerate(encoded) if (number % VALIDATION == VALIDATION - 1) == validation
            ]
            end = np.array([tokenizer.eos_token_id], np.int32)
            pieces = [piece for tokens in chosen for piece in (np.array(tokens, np.int32), end)]
            with tempfile.TemporaryDirectory(dir=file.parent, prefix=".tokens-") as scratch:
                np.save(Path(scratch) / file.name, np.concatenate(pieces) if pieces else end[:0])
                os.replace(Path(scratch) / file.name, file)
    except OSError as error:
        raise UserError(f"cannot write {files[0].parent}: {error.strerror or error}") from error
