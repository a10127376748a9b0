"""Show a diagnosis: one sentence first, the details under it, and everything in a folder to send to a colleague."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from workshop.diagnose.evidence import Diagnosis, Place, Rank, Scene, to_json
from workshop.diagnose.stacks import native_stacks, read_stacks
from workshop.files import write_atomically
from workshop.repository import open_folder

KNOWN_CALLS = 5  # the last collectives of each rank in the text; the JSON file has all


def show(diagnosis: Diagnosis, scene: Scene, output: str, reason: str) -> None:
    """Print a diagnosis on standard error, and write the details into a folder.

    Args:
        diagnosis: what to print.
        scene: what was seen; its ``missing`` is printed too.
        output: the folder; "": diagnosis-DATE-TIME in the current folder.
        reason: why it is printed now, such as "no progress for 12 s".
    """
    print(text(diagnosis, scene, reason), file=sys.stderr, flush=True)
    if folder := write(diagnosis, scene, output):
        print(f"  details: {os.path.relpath(folder)}/report.txt and more", file=sys.stderr, flush=True)


def text(diagnosis: Diagnosis, scene: Scene, reason: str) -> str:
    """Return a diagnosis as text of a few lines."""
    lines = [f"workshop diagnose: {reason}", f"  {diagnosis.line}"]
    lines += [f"  {name}: {value}" for name, value in (("why", diagnosis.why), ("fix", diagnosis.fix)) if value]
    if diagnosis.place:
        lines.append(f"  where: {_with_source(diagnosis.place)}")
    lines += [f"  not known: {sentence}" for sentence in scene.missing]
    return "\n".join(lines)


def _with_source(place: Place) -> str:
    try:
        line = Path(place.file).read_text(errors="replace").splitlines()[place.line - 1].strip()
    except (OSError, IndexError):
        return f"{place.file}:{place.line}"
    return f"{place.file}:{place.line}   {line}"


def write(diagnosis: Diagnosis, scene: Scene, output: str = "") -> Path | None:
    """Write everything into a folder, and return it; None: the folder cannot be written.

    Args:
        diagnosis: the diagnosis.
        scene: what was seen.
        output: the folder; "": diagnosis-DATE-TIME in the current folder.
    """
    try:
        folder = folder_for(output)
        write_atomically(folder / "scene.json", json.dumps(to_json(scene), indent=1) + "\n")
        write_atomically(folder / "report.txt", text(diagnosis, scene, "report") + "\n\n" + details(scene))
        here = [rank for rank in scene.alive if rank.node == scene.here]
        for pid in [pid for rank in here for pid in (rank.pid, *(child.pid for child in rank.children))]:
            if stacks := native_stacks(pid) or read_stacks(pid).text:
                write_atomically(folder / f"stacks-{pid}.txt", stacks + "\n")
    except Exception as error:  # a full disk must not end the program that is watched
        print(f"workshop diagnose: the details cannot be written ({error})", file=sys.stderr)
        return None
    return folder


def folder_for(output: str) -> Path:
    """Return the folder of a report, and create it.

    Raises:
        UserError: it cannot be created.
    """
    return open_folder(output or f"diagnosis-{time.strftime('%Y%m%d-%H%M%S')}")


def details(scene: Scene) -> str:
    """Return what was seen of each rank as text."""
    lines = []
    for rank in scene.ranks:
        state = rank.doing.words() if rank.alive else "ended"
        lines.append(f"{rank.name} (process {rank.pid} on {rank.node}): {state}; {rank.busy:.0%} of a core")
        lines += _of_rank(rank)
    return "\n".join(lines) + "\n"


def _of_rank(rank: Rank) -> list[str]:
    lines = []
    if rank.failure:
        lines += ["  exception:", *(f"    {line}" for line in rank.failure.traceback.splitlines())]
    for call in (rank.calls or ())[-KNOWN_CALLS:]:
        state = "complete" if call.complete else "not complete"
        lines.append(f"  group {call.group}: {call}, {call.shape()}, {state}")
    lines += [f"    {place.function} ({place.file}:{place.line})" for place in rank.doing.stack]
    lines += [f"  child process {child.pid}: {child.doing.words()}" for child in rank.children]
    return lines
