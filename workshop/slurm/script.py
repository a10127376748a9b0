"""Read a job script: its text, and the options in its directives."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError

MARKS = {"slurm": "#SBATCH", "pbs": "#PBS"}
LONG = {
    "-A": "--account",
    "-c": "--cpus-per-task",
    "-C": "--constraint",
    "-D": "--chdir",
    "-G": "--gpus",
    "-J": "--job-name",
    "-n": "--ntasks",
    "-N": "--nodes",
    "-o": "--output",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
}


@dataclass(frozen=True)
class Script:
    """A job script.

    Attributes:
        path: its path.
        options: the options in its directives. On Slurm by long name, "--nodes"; on PBS "-q", and "select", "walltime" of -l.
        sources_site: whether it sources the site's settings, ``$WORKSHOP_SITE``.
    """

    path: Path
    options: dict[str, str]
    sources_site: bool


def script_text(path: Path) -> str:
    """Return the text of a job script.

    Raises:
        UserError: there is no such file, or it has Windows line endings.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if b"\r\n" in data:
        raise UserError(f"{path.name} has Windows line endings; repair it with: sed -i 's/\\r$//' {path}")
    return data.decode(errors="replace")


def ignored_directives(text: str) -> list[tuple[int, str]]:
    """Return the number of each line that looks like a directive but that the scheduler ignores silently, and the reason."""
    found, header = [], True
    for number, line in enumerate(text.splitlines(), 1):
        header = header and (not line.strip() or line.lstrip().startswith("#"))
        if spaced := re.match(r"#[ \t]+(SBATCH|PBS)[ \t]+-", line):
            found.append((number, f"a space after # makes it a comment; write #{spaced[1]}"))
        elif not header and (mark := re.match(r"#(?:SBATCH|PBS)(?=\s+-)", line)):
            found.append((number, f"{mark[0]} after the first command is ignored; move it up"))
    return found


def read_script(path: Path, scheduler: str) -> Script:
    """Read the directives of a job script.

    Raises:
        UserError: there is no such file, it is for a different scheduler, or a directive would be ignored.
    """
    text = script_text(path)
    for number, what in ignored_directives(text):
        raise UserError(f"line {number} of {path.name}: {what}")
    words, other = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"#(?:SBATCH|PBS)(?=\s+-)", line)
        if mark and mark[0] == MARKS[scheduler]:
            try:
                words += shlex.split(line.removeprefix(mark[0]), comments=True)
            except ValueError as error:
                raise UserError(f"line {number} of {path.name}: {error}") from None
        elif mark:
            other = mark[0]
    if not words and other:
        places = {"slurm": "slurm-multinode", "pbs": "slurm-multinode/pbs"}
        raise UserError(
            f"the site reads {MARKS[scheduler]} lines, but {path.name} has {other}; use a script in {places[scheduler]}"
        )
    if not words:
        raise UserError(f"{path.name} has no {MARKS[scheduler]} lines, which say what the job needs")
    options = _slurm_options(words) if scheduler == "slurm" else _pbs_options(words)
    return Script(path, options, bool(re.search(r"^[^#\n]*\b(source|\.)\s.*WORKSHOP_SITE", text, re.MULTILINE)))


def _slurm_options(words: Sequence[str]) -> dict[str, str]:
    """Return {"--nodes": "2"} for ["-N", "2"], ["-N2"], ["--nodes", "2"] or ["--nodes=2"]."""
    options, waiting = {}, ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            options[name] = value
            waiting = "" if equals else name
        elif word.startswith("-"):
            name = LONG.get(word[:2], word[:2])
            options[name] = word[2:]
            waiting = "" if word[2:] else name
        elif waiting:
            options[waiting], waiting = word, ""
    return options


def _pbs_options(words: Sequence[str]) -> dict[str, str]:
    """Return {"-q": "main", "select": "1:ngpus=4"} for ["-q", "main", "-l", "select=1:ngpus=4"]."""
    options: dict[str, str] = {}
    waiting = ""
    for word in words:
        if word.startswith("-"):
            waiting, word = word[:2], word[2:]
        if waiting == "-l":
            options |= {name: value for name, _, value in (each.partition("=") for each in word.split(",") if each)}
        elif waiting:
            options[waiting] = word
    return options
