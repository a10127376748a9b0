"""Judge the folder of a class: can learners write into it, and can they read, change or delete the files of others?"""

import grp
import os
import pwd
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

NEEDED = 20_000_000  # bytes for the files of a class
DEFAULT_ACL = "system.posix_acl_default"


@dataclass(frozen=True)
class Gap:
    """Something that is wrong with the folder.

    Attributes:
        seen: what is wrong, and what follows from it.
        advice: what to do.
        prevents: whether the board cannot work with it.
    """

    seen: str
    advice: str
    prevents: bool = False


def gaps(folder: Path) -> list[Gap]:
    """Return what is wrong with the folder of a class, the worst first."""
    try:
        mode = folder.stat().st_mode
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return [Gap(f"{folder} cannot be read ({error.strerror})", "ask the owner of the folder", True)]
    found = []
    if free < NEEDED:
        found.append(Gap(f"the disk of {folder} is full, so learners cannot share", "free space on it", True))
    if not mode & (stat.S_IWGRP | stat.S_IWOTH) and not _has_acl(folder):
        found.append(Gap(f"only its owner can write into {folder}", f"chmod 3773 {folder}", True))
    elif not mode & stat.S_ISVTX:
        found.append(Gap("learners can delete the files of others", f"chmod +t {folder}"))
    if not mode & stat.S_ISGID and not _has_acl(folder):
        found.append(
            Gap("the files get the group of the learner, so you may not be able to read them", f"chmod g+s {folder}")
        )
    if mode & stat.S_IROTH:
        found.append(Gap("everybody can list who shares", f"chmod o-r {folder}"))
    return found


def readers(folder: Path) -> str:
    """Return who can read what learners share, as far as the mode of the folder says it."""
    status = folder.stat()
    try:
        owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        owner, group = str(status.st_uid), str(status.st_gid)
    return f"{owner} and the group {group}" if status.st_mode & stat.S_IRGRP else owner


def _has_acl(folder: Path) -> bool:
    """Whether new files in the folder get an access control list."""
    try:
        return DEFAULT_ACL in os.listxattr(folder)
    except (OSError, AttributeError):  # a file system, or a system, without them
        return False
