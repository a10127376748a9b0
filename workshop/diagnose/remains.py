"""``workshop diagnose FOLDER``: what a program has left behind: its logs, and the files of PyTorch's flight recorder."""

from __future__ import annotations

import json
import re
from pathlib import Path

from workshop.diagnose import recorder
from workshop.diagnose.causes import judge
from workshop.diagnose.evidence import Call, Diagnosis, Doing, Failure, Rank, Scene, from_json
from workshop.diagnose.report import show
from workshop.errors import UserError
from workshop.run.failures import is_echo

LARGEST = 50_000_000  # bytes of a log that are read, from its start
TRACE = re.compile(r"(?:nccl_trace_rank_|trace_rank_|rank[_-]?)(\d+)", re.I)
ERROR = re.compile(r"^(?:\[?(?:rank|default)?(\d+)\]?:\s*)?([A-Za-z_.]*(?:Error|Exception|Interrupt|Exit)): (.*)$")
PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def diagnose_folder(folder: Path, output: str = "") -> int:
    """Report what the files of a folder say.

    Args:
        folder: contains log files, files of the flight recorder (``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``), or the report of an
            earlier call.
        output: the folder of the report.

    Returns:
        1: something has failed or hung; 0: nothing was found.

    Raises:
        UserError: the folder contains none of these.
    """
    scene = _scene(folder)
    if not scene.ranks and not scene.log:
        raise UserError(f"{folder} contains no log, no file of the flight recorder and no report" + _why(scene))
    diagnosis = judge(scene) if scene.ranks else _from_log(scene.log)
    show(diagnosis, scene, output, str(folder))
    return 1


def _why(scene: Scene) -> str:
    return f" that can be read: {scene.missing[0]}" if scene.missing else ""


def _scene(folder: Path) -> Scene:
    earlier = folder / "scene.json"
    if earlier.exists():
        try:
            return from_json(json.loads(earlier.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return Scene(
                (), missing=(f"{earlier.name} is not a report of this version of the command, or it is incomplete",)
            )
    ranks, missing = [], []
    for file in sorted(each for each in folder.rglob("*") if each.is_file() and TRACE.search(each.name)):
        number = TRACE.search(file.name)
        if number is None or file.suffix in (".log", ".txt", ".out", ".err"):
            continue
        try:
            ranks.append(_rank(int(number[1]), recorder.read(file.read_bytes())))
        except (OSError, ValueError) as error:
            missing.append(f"{file.name}: {error}")
    return Scene(tuple(ranks), missing=tuple(missing), log=first_error(folder))


def _rank(number: int, calls: tuple[Call, ...]) -> Rank:
    pending = next((call for call in reversed(calls) if not call.complete), None)
    doing = Doing("waits", pending.name, pending.place) if pending else Doing()
    return Rank(number, doing=doing, calls=calls)


def first_error(folder: Path) -> str:
    """Return the first error in the log files of a folder that is no consequence of an error of a different rank; "": none."""
    echo = ""
    for file in sorted(each for each in folder.rglob("*") if each.suffix in (".log", ".txt", ".out", ".err", "")):
        if not file.is_file():
            continue
        with open(file, errors="replace") as log:
            lines = log.read(LARGEST).splitlines()
        for index, line in enumerate(lines):
            if ERROR.match(line):
                begin = max(
                    (at for at in range(index) if lines[at].rstrip().endswith("Traceback (most recent call last):")),
                    default=index,
                )
                error = "\n".join(lines[begin : index + 1])
                if not is_echo(error):
                    return error
                echo = echo or error
    return echo


def _from_log(error: str) -> Diagnosis:
    last = error.splitlines()[-1]
    places = PLACE.findall(error)
    from workshop.diagnose.evidence import Place
    from workshop.diagnose.programs import own_place

    place = own_place([Place(file, int(line), function) for file, line, function in reversed(places)])
    match = ERROR.match(last)
    assert match is not None
    kind, message = match[2].rpartition(".")[2], match[3]
    return judge(Scene((Rank(int(match[1] or 0), alive=False, failure=Failure(kind, message, error, place)),)))
