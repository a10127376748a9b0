"""What the main thread of a process does: its Python stack, read by py-spy, and what the kernel says of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop.diagnose.evidence import Doing, Kind, Place
from workshop.diagnose.kernel import waits_for
from workshop.diagnose.programs import own_place

# Functions of torch.distributed in which a rank joins the others.
JOINS = {
    "init_process_group",
    "rendezvous",
    "_store_based_barrier",
    "_create_c10d_store",
    "init_device_mesh",
    "_new_process_group_helper",
}
COLLECTIVES = {
    *(
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "reduce_scatter",
        "reduce_scatter_tensor",
    ),
    *(
        "reduce",
        "broadcast",
        "broadcast_object_list",
        "scatter",
        "scatter_object_list",
        "gather",
        "gather_object",
        "barrier",
    ),
    *("monitored_barrier", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
}


@dataclass(frozen=True)
class Stacks:
    """The stacks of a process.

    Attributes:
        main: the stack of the main thread, innermost first; empty: it could not be read.
        holds_lock: whether the main thread has Python's lock (the GIL), so that it runs Python or C code.
        text: all stacks as text.
        problem: why they could not be read; "": they were.
    """

    main: tuple[Place, ...] = ()
    holds_lock: bool = False
    text: str = ""
    problem: str = ""


def py_spy() -> str | None:
    """Return the path of py-spy: in the environment of the course, or else on the PATH; None: there is none."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def read_stacks(pid: int, timeout: float = 5) -> Stacks:
    """Read the stacks of a process, which keeps running.

    Args:
        pid: the process ID of a Python process.
        timeout: seconds after which py-spy is ended.
    """
    program = py_spy()
    if program is None:
        return Stacks(problem="py-spy is not installed here, so no Python stack can be read (pip install py-spy)")
    try:
        # --nonblocking: py-spy would otherwise stop the process while it reads.
        result = subprocess.run(
            [program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        threads = json.loads(result.stdout) if result.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return Stacks(problem=f"py-spy did not answer within {timeout:g} s for process {pid}")
    except ValueError:
        threads = None
    if not threads:
        return Stacks(problem=_why_not(pid, result.stderr))
    return _stacks(threads, pid)


def _stacks(threads: list[dict[str, Any]], pid: int) -> Stacks:
    """Return the stacks in the JSON of py-spy."""
    main = next((each for each in threads if each.get("os_thread_id") == pid), threads[-1])
    lines = []
    for thread in threads:
        lines.append(
            f"thread {thread.get('thread_name') or thread['thread_id']}"
            + (", has the GIL" if thread.get("owns_gil") else "")
        )
        lines += [f"    {frame['name']} ({frame['filename']}:{frame['line']})" for frame in thread["frames"]]
    places = tuple(
        Place(frame["filename"], int(frame["line"] or 0), frame["name"].rpartition(".")[2]) for frame in main["frames"]
    )
    return Stacks(places, bool(main.get("owns_gil")), "\n".join(lines))


def wanted_world(pid: int, timeout: float = 5) -> int:
    """Return the number of ranks for which a process waits in init_process_group; 0: it could not be read."""
    program = py_spy()
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        command = [program or "py-spy", "dump", "--nonblocking", "--locals", "--json", "--pid", str(pid)]
        threads = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=timeout).stdout)
        for frame in (
            frame for thread in threads for frame in thread["frames"] if frame["name"].endswith(tuple(JOINS))
        ):
            for local in frame.get("locals") or ():
                if local["name"] == "world_size" and str(local.get("repr", "")).isdigit():
                    return int(local["repr"])
    return 0


def native_stacks(pid: int, timeout: float = 20) -> str:
    """Return all stacks of a process with the frames of C and C++ as text; "": they could not be read in time."""
    program = py_spy()
    if program is None:
        return ""
    try:
        result = subprocess.run(
            [program, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return ""
    return result.stdout if result.returncode == 0 else ""


def _why_not(pid: int, error: str) -> str:
    if not os.path.exists(f"/proc/{pid}"):
        return f"process {pid} has ended in the meantime"
    if "ermission" in error or "not permitted" in error:
        reason = "the kernel does not allow you to trace it"
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        if scope.exists() and scope.read_text().strip() not in ("", "0"):
            reason += (
                f" (ptrace_scope is {scope.read_text().strip()}: start the program with `workshop diagnose -- COMMAND`)"
            )
        return f"no stack of process {pid}: {reason}"
    first = error.strip().splitlines()[0] if error.strip() else "no answer"
    return f"no stack of process {pid}: py-spy says: {first.removeprefix('Error: ')}"


def what_it_does(pid: int, stacks: Stacks) -> Doing:
    """Return what the main thread of a process does, from its stack and from the kernel."""
    kind, what = waits_for(pid)
    place = own_place(stacks.main)
    if kind == "stopped":
        return Doing(kind, "", place, stacks.main)
    known = _from_stack(stacks.main)
    if known:
        return Doing(known[0], known[1], place, stacks.main)
    if kind in ("lock", "network") and _ends(stacks.main):
        return Doing("ends", "", place, stacks.main)
    if kind == "unknown" and stacks.holds_lock:
        kind = "computes"
    if kind == "lock" and _inside(stacks.main, "torch/autograd/graph.py"):
        return Doing("waits", "the backward pass", place, stacks.main)
    top = stacks.main[0].function if stacks.main else ""
    return Doing(kind, what or top, place, stacks.main)


def from_stack(stack: tuple[Place, ...]) -> Doing:
    """Return what a process did according to its stack alone, innermost first."""
    kind, what = _from_stack(stack) or ("unknown", stack[0].function)
    if _inside(stack, "torch/autograd/graph.py"):
        kind, what = "waits", "the backward pass"
    return Doing(kind, what, own_place(stack), stack)


def _from_stack(stack: Sequence[Place]) -> tuple[Kind, str] | None:
    """Return what the functions of torch on the stack mean; None: nothing is known of them."""
    in_torch = [frame for frame in stack if "/torch/" in frame.file]
    if any(frame.function in JOINS or "elastic/rendezvous" in frame.file for frame in in_torch):
        return "joins", ""
    named = [frame for frame in in_torch if "torch/distributed" in frame.file and frame.function in COLLECTIVES]
    if named:
        return "waits", named[-1].function  # the outermost: barrier() may call all_reduce()
    if any(
        frame.file.endswith("torch/utils/data/dataloader.py") and "__next__" in frame.function for frame in in_torch
    ):
        return "loads", ""
    if any(frame.function == "destroy_process_group" for frame in in_torch):
        return "ends", ""
    return None


def _ends(stack: Sequence[Place]) -> bool:
    return any(frame.function in ("_shutdown", "_exit_function", "_run_exitfuncs") for frame in stack) or not own_place(
        stack
    )


def _inside(stack: Sequence[Place], file: str) -> bool:
    return any(frame.file.endswith(file) for frame in stack)
