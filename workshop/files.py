"""Write files, and remove folders."""

import os
import shutil
import stat
from pathlib import Path


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Write a file so that every reader sees either the old content or the new content, never a part of it.

    The content goes into a temporary file in the same folder, which ``os.replace`` then moves into place. A file that exists
    keeps its mode. After a failure the old file is unchanged, and no temporary file is left.

    Args:
        path: the file; its folder must exist.
        content: text (written in UTF-8) or bytes.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove(folder: str | os.PathLike) -> None:
    """Remove a folder with all that is in it, also if a signal comes meanwhile, whose exception is then raised."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
