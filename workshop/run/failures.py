"""Find out why a run failed: the error of the rank that failed first."""

import json
import os
import pickle
import re
from contextlib import suppress
from pathlib import Path

from workshop.run.processes import Outcome

LAUNCHER_ERRORS = ("ProcessRaisedException", "ProcessExitedException", "ChildFailedError")
# The word NCCL alone is not a sign: "Duplicate GPU detected" and "invalid usage" are errors of the rank that reports them.
LOST_CONNECTION = re.compile(
    r"by (remote )?peer|remote (worker|process)|Broken pipe|Connection refused|Timed out waiting"
    r"|NCCL.*(abort|timeout|timed out|unhandled system error|ncclSystemError|ncclRemoteError)"
    r"|(abort|timeout|timed out).*NCCL"
)
SHARED_GPU = re.compile(r"Duplicate GPU detected ?: rank (\d+) and rank (\d+) both on (?:CUDA )?device (\w+)")
NO_SUCH_GPU = re.compile(r"invalid device ordinal")
ONE_EACH = (
    "Start at most as many processes per node as it has GPUs, and call torch.accelerator.set_device_index with the local rank "
    "in each of them. To train on the CPU, hide the GPUs with CUDA_VISIBLE_DEVICES= (HIP_VISIBLE_DEVICES= on AMD)."
)


def first_failure(outcome: Outcome, torchrun_logs: Path, temporary: Path | None = None) -> str:
    """Return why a run failed: the traceback of the rank that failed first if it exists, else the last lines of the output.

    torchrun itself prints a table instead of the traceback; with @record, each rank writes its traceback to error.json in the
    log folder. mp.spawn prints one traceback, from the process that it found ended first. On a busy machine this can be a
    process that only lost its connection to the rank that failed. All tracebacks are in its folder for temporary files.

    If ``explanation`` knows the error, the last line says what to do.

    Args:
        outcome: the result of ``launch``.
        torchrun_logs: torchrun's log folder (``PET_LOG_DIR``).
        temporary: the run's own folder for temporary files (``TMPDIR``), if it had one.
    """
    failure = _first_failure(outcome, torchrun_logs, temporary)
    # Of two ranks on one GPU, the one that failed first may have reported only a lost connection.
    known = explanation(failure) or explanation(outcome.output)
    return f"{failure.rstrip()}\n{known}" if known else failure


def explanation(error: str) -> str:
    """Return in plain words what an error of a library means and what to do; "": the error is not one of these.

    Args:
        error: a message, a traceback, or the output of a run.
    """
    if shared := SHARED_GPU.search(error):
        first, second = sorted(map(int, shared.groups()[:2]))
        return f"Ranks {first} and {second} use the same GPU ({shared[3]}), which NCCL refuses. {ONE_EACH}"
    if NO_SUCH_GPU.search(error):
        return f"A process asked for a GPU with an index that it does not see. {ONE_EACH}"
    return ""


def _first_failure(outcome: Outcome, torchrun_logs: Path, temporary: Path | None) -> str:
    if outcome.status is None:
        return "it made no progress and was ended; its last lines:\n" + "".join(
            outcome.output.splitlines(keepends=True)[-10:]
        )
    errors = []
    for file in torchrun_logs.glob("**/error.json"):
        try:
            traceback = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
        except (ValueError, KeyError, TypeError):
            continue
        # All ranks fail at almost the same time, so prefer an error that is not a lost connection, then the oldest file.
        errors.append((is_echo(traceback), file.stat().st_mtime_ns, file.parent.name, traceback))
    if errors:
        *_, rank, traceback = min(errors)
        return f"rank {rank} failed first:\n{traceback.strip()}"
    spawned = re.search(r"-- Process (\d+) terminated with the following error:\n(.*)", outcome.output, re.DOTALL)
    if spawned:
        tracebacks = []
        for file in sorted(temporary.glob("pytorch-errorfile-*") if temporary else [], key=os.path.getmtime):
            with suppress(EOFError, pickle.UnpicklingError):  # the process was ended while it wrote the file
                tracebacks.append(pickle.loads(file.read_bytes()).strip())
        first = next((traceback for traceback in tracebacks if not is_echo(traceback)), spawned[2].strip())
        # mp.spawn tells the rank only of the traceback that it printed.
        rank = f"rank {spawned[1]}" if first in spawned[2] else f"a rank other than {spawned[1]}"
        return f"{rank} failed first:\n{first}"
    # The report of torchrun begins with this line, and ends with a traceback of torchrun itself.
    own, *said = re.split(
        r"^.*failed \(exitcode: (-?\d+)\) local_rank: (\d+).*\n", outcome.output, maxsplit=1, flags=re.M
    )
    place = own.rfind("Traceback (most recent call last)")
    error = own[place:].strip() if place >= 0 else "\n".join(own.splitlines()[-15:])
    return f"rank {said[1]} ended first, with exit status {said[0]}:\n{error}" if said else error


def is_echo(text: str, type_name: str = "") -> bool:
    """Return whether an error only says that a rank lost its connection to a process that failed before it.

    Args:
        text: the error's message, or its traceback.
        type_name: the name of the exception's class, if known.
    """
    return type_name in LAUNCHER_ERRORS or LOST_CONNECTION.search(text) is not None
