"""What the owner of a program asks of the check: on the command line, or in ``[tool.workshop-check]`` of pyproject.toml."""

import difflib
import shlex
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workshop.check.rules.rule import RULES
from workshop.errors import UserError

TABLE = "workshop-check"


@dataclass(frozen=True)
class Settings:
    """How the check runs a program, and what it reports."""

    folder: Path  # in which the command starts
    command: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()  # the rules whose findings are not reported
    steps: int | None = None  # after how many optimizer steps the run is stopped; None: 30, if it takes long
    resume_args: tuple[str, ...] = ()  # the arguments with which a second start resumes
    baseline: Path | None = None  # findings that are known
    write_baseline: Path | None = None  # the file that gets the present findings
    junit: Path | None = None
    sarif: Path | None = None


def settings_of(
    words: Sequence[str], *, steps: int | None, resume_args: str, ignore: Sequence[str], **files: Path | None
) -> Settings:
    """Return the settings of pyproject.toml, replaced by those that the command line has.

    Raises:
        UserError: a setting is wrong.
    """
    require_kinds(ignore, "--ignore")
    for file in (files["write_baseline"], files["junit"], files["sarif"]):
        if file and not file.parent.is_dir():
            raise UserError(f"{file}: there is no folder {file.parent}")
    resume = split(resume_args, "--resume-args")
    given = {"command": tuple(words), "ignore": tuple(ignore), "steps": steps, "resume_args": resume, **files}
    given["folder"] = Path.cwd() if words else None
    changes: dict[str, Any] = {name: value for name, value in given.items() if value}
    return replace(read_settings(Path.cwd()), **changes)


def read_settings(folder: Path) -> Settings:
    """Return the settings in the nearest pyproject.toml with the table: here, or in a parent up to that with .git.

    Raises:
        UserError: the file or a setting is wrong.
    """
    for place in (folder, *folder.parents):
        file = place / "pyproject.toml"
        if file.is_file() and (table := _table(file)) is not None:
            values = {key.replace("-", "_"): _value(key, value, file) for key, value in table.items()}
            return Settings(place, **values)
        if (place / ".git").exists():
            break
    return Settings(folder)


def _table(file: Path) -> dict[str, Any] | None:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get(TABLE)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(table, dict | None):
        raise UserError(f"{file}: tool.{TABLE} must be a table, [tool.{TABLE}]")
    return table


def _value(key: str, value: Any, file: Path) -> Any:
    """Return the value of a key in the type of ``Settings``."""
    where = f"{file}: {key} in [tool.{TABLE}]"
    if key not in KEYS:
        raise UserError(f"{where} is not a setting; the settings are {', '.join(KEYS)}")
    fits, expected = KEYS[key]
    if not fits(value):
        raise UserError(f"{where} must be {expected}, not {value!r}")
    if key == "ignore":
        require_kinds(value, where)
    if key == "baseline":
        return file.parent / value
    if isinstance(value, str):
        return split(value, where)
    return tuple(value) if isinstance(value, list) else value


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


# For each key: whether a value fits, and what it should be.
KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "command": (lambda value: _is_text(value) or _is_list(value), "a string or a list of strings"),
    "ignore": (_is_list, "a list of strings"),
    "steps": (lambda value: type(value) is int and value >= 2, "a whole number of at least 2"),
    "resume-args": (_is_text, "a string"),
    "baseline": (_is_text, "a string, the path of a file"),
}


def split(text: str, where: str) -> tuple[str, ...]:
    """Split a command or its arguments into words, as a shell does.

    Raises:
        UserError: it has an open quotation mark; the message begins with ``where``.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{where}: {error} in {text}") from error


def require_kinds(kinds: Iterable[str], where: str) -> None:
    """Require that each of these kinds is the name of a rule.

    Raises:
        UserError: one is not; the message begins with ``where`` and has the nearest kinds.
    """
    for kind in kinds:
        if kind not in RULES:
            nearest = ", ".join(difflib.get_close_matches(kind, RULES, cutoff=0))
            raise UserError(f"{where}: no finding has the kind {kind}; the nearest kinds are {nearest}")
