"""Downloading one file: from the first mirror that has the right one."""

import sys
from pathlib import Path

from workshop.errors import UserError


def download(name: str, sha256: str, mirrors, scratch: Path) -> Path:
    """Download a file into a folder and return its path.

    Args:
        name: its name.
        sha256: what it has to have.
        mirrors: addresses of folders that hold it, tried in turn.
        scratch: the folder.

    Raises:
        UserError: no mirror gave a file with the right SHA-256.
    """
    import pooch  # here: importing it takes a while, and training never needs it
    import requests

    pooch.get_logger().setLevel("ERROR")
    problems = []
    for mirror in mirrors:
        url = mirror.rstrip("/") + "/" + name
        try:
            bar = sys.stderr.isatty()
            downloader = pooch.HTTPDownloader(progressbar=bar, timeout=30)
            return Path(pooch.retrieve(url, "sha256:" + sha256, name, scratch, downloader=downloader))
        except requests.HTTPError as error:
            problems.append(f"{url}: HTTP status {error.response.status_code}")
        except requests.RequestException as error:
            problems.append(f"{url}: {type(error).__name__}")
        except ValueError as error:
            if "hash" not in str(error):
                raise
            problems.append(f"{url}: what came is not the file expected (SHA-256 differs)")
    raise UserError(f"could not fetch {name}; " + "; ".join(problems))
