"""Ask the kernel what a process waits for: Python's stack does not show calls into C."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

from workshop.diagnose.evidence import Kind

# The numbers of system calls, from the tables of Linux (syscall_64.tbl; asm-generic/unistd.h for aarch64).
CALLS: dict[str, dict[int, Kind]] = {
    "x86_64": {
        **dict.fromkeys(
            (0, 1, 17, 18, 19, 20, 2, 257, 4, 5, 6, 262, 332, 74, 75, 72, 73, 78, 217, 82, 87, 263, 285), "file"
        ),
        **dict.fromkeys((7, 23, 42, 43, 45, 44, 46, 47, 232, 270, 271, 281, 288, 441), "network"),
        **dict.fromkeys((35, 230), "sleep"),
        **dict.fromkeys((61, 247), "child"),
        202: "lock",
    },
    "aarch64": {
        **dict.fromkeys((63, 64, 65, 66, 67, 68, 56, 79, 80, 291, 82, 83, 25, 32, 61, 38, 35, 47), "file"),
        **dict.fromkeys((72, 73, 22, 203, 202, 207, 206, 211, 212, 242, 441), "network"),
        **dict.fromkeys((101, 115), "sleep"),
        **dict.fromkeys((95, 260), "child"),
        98: "lock",
    },
}
# The same by the name of the function of the kernel in which the process sleeps, if its system call cannot be read.
SLEEPS_IN: dict[str, Kind] = {
    "futex": "lock",
    "nanosleep": "sleep",
    "poll": "network",
    "epoll": "network",
    "select": "network",
    "sk_wait": "network",
    "tcp_": "network",
    "inet_": "network",
    "do_wait": "child",
    "pipe": "file",
    "folio": "file",
    "nfs": "file",
    "fuse": "file",
    "flock": "file",
    "jbd2": "file",
    "wait_for_partner": "file",
}


def waits_for(pid: int) -> tuple[Kind, str]:
    """Return what the main thread of a process waits for, and the file if it is one; "unknown": it could not be read.

    ``/proc/PID/syscall`` needs the permission to trace the process; ``/proc/PID/wchan`` often does not.
    """
    folder = Path(f"/proc/{pid}")
    state = _text(folder / "stat").rpartition(")")[2].split()[:1]
    if state in (["T"], ["t"]):
        return "stopped", ""
    words = _text(folder / "syscall").split()
    if words == ["running"]:
        return "computes", ""
    if words and words[0].isdigit():
        kind = CALLS.get(platform.machine(), {}).get(int(words[0]))
        if kind == "file":
            return _file_or_network(pid, int(words[0]), words)
        if kind:
            return kind, ""
    channel = _text(folder / "wchan")
    for part, kind in SLEEPS_IN.items():
        if part in channel:
            return kind, ""
    return ("file", "a disk or network file system") if state == ["D"] else ("unknown", "")


def _file_or_network(pid: int, number: int, words: list[str]) -> tuple[Kind, str]:
    """Return the file that the first argument of a system call names, which may also be a socket or a pipe."""
    if number in (2, 257, 56, 4, 6, 262, 332, 82, 87, 263, 79, 291):
        return "file", _path_argument(pid, words[1] if number in (2, 4, 6, 82, 87) else words[2])
    try:
        target = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
    except (OSError, ValueError):
        return "file", ""
    if target.startswith("socket:"):
        return "network", ""
    return "file", "a pipe" if target.startswith("pipe:") else target


def _path_argument(pid: int, address: str) -> str:
    """Read the path that a process has given to a system call, such as open; "": it could not be read."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(int(address, 16))
            return memory.read(4096).partition(b"\0")[0].decode(errors="replace")
    except (OSError, ValueError, OverflowError):
        return ""


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
