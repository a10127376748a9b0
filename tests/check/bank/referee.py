"""The referee: public-shaped programs whose mistakes were written without sight of the rules.

    PYTHONPATH=tests python -m check.bank.referee [SHAPE ...] [--save]

Each folder of ``tests/check/referee`` is a correct program, with ``referee.toml``: how its owner starts it, two mistakes and a
correct style, as edits. A mistake counts as named if an error of one of its ``kinds`` is found; its line counts as right if
``where`` is its ``line``. It counts as accepted if a reader without sight of the rules also called it right, because one would
repair the mistake there (``also``). ``kinds`` was added after the first run of the check on the mistake.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests/check/referee"
SCORE = ROOT / "results/referee.json"


@dataclass
class Version:
    """A program of the referee, with the edits of a mistake or a style."""

    shape: str
    name: str
    kind: str  # "correct", "style" or "mistake"
    start: list[str]
    says: str = ""
    file: str = ""
    edits: list[list[str]] = field(default_factory=list)
    line: str = ""  # the text of the line to point at
    also: list[str] = field(default_factory=list)  # texts of other lines that are right; "other.py: text"
    kinds: list[str] = field(default_factory=list)  # rules that name the cause

    def write(self, folder: Path) -> None:
        """Write the program into a new folder."""
        ignored = shutil.ignore_patterns("referee.toml", "__pycache__")
        shutil.copytree(FOLDER / self.shape, folder, ignore=ignored)
        if self.edits:
            path = folder / self.file
            text = path.read_text()
            for old, new in self.edits:
                old, new = old.strip("\n"), new.strip("\n")
                assert text.count(old) == 1, (
                    f"{self.shape}/{self.name}: {text.count(old)} times in {self.file}: {old!r}"
                )
                text = text.replace(old, new)
            path.write_text(text)

    def lines(self, folder: Path) -> list[str]:
        """Where the finding should point, as "train.py:12"."""
        return _places(folder, self.file, self.line)

    def accepted(self, folder: Path) -> list[str]:
        """Where the finding may point."""
        found = self.lines(folder)
        for text in self.also:
            file, _, rest = text.partition(": ")
            other = file.endswith(".py") and (folder / file).is_file()
            found += _places(folder, file if other else self.file, rest if other else text)
        return found


def _places(folder: Path, file: str, text: str) -> list[str]:
    """The first lines of a text of one or more lines, as "train.py:12"; spaces at their beginnings do not matter."""
    wanted = [line.strip() for line in text.strip().splitlines()]
    lines = [line.strip() for line in (folder / file).read_text().splitlines()]
    numbers = range(len(lines) - len(wanted) + 1)
    return [f"{file}:{at + 1}" for at in numbers if lines[at : at + len(wanted)] == wanted]


def versions(*shapes: str) -> Iterator[Version]:
    """Yield all programs, or those of some shapes."""
    for path in sorted(FOLDER.glob("*/referee.toml")):
        shape, said = path.parent.name, tomllib.loads(path.read_text())
        if shapes and shape not in shapes:
            continue
        yield Version(shape, "correct", "correct", said["start"])
        for kind in ("style", "mistake"):
            for each in said.get(kind, []):
                own = {
                    name: each[name]
                    for name in ("name", "says", "file", "edits", "line", "also", "kinds")
                    if name in each
                }
                yield Version(shape, kind=kind, start=said["start"], **own)


def checked(version: Version, *options: str) -> dict[str, object]:
    """Check a program as its owner would, and return what was found."""
    with tempfile.TemporaryDirectory(prefix="referee-") as place:
        folder = Path(place) / version.shape
        version.write(folder)
        command = [sys.executable, "-P", "-m", "workshop", "check", "--json", "--device", "cpu", *options, "--"]
        done = subprocess.run([*command, *version.start], cwd=folder, capture_output=True, text=True, timeout=600)
        mistake = version.kind == "mistake"
        lines, accepted = (version.lines(folder), version.accepted(folder)) if mistake else ([], [])
    row: dict[str, object] = {"shape": version.shape, "name": version.name, "kind": version.kind}
    if not done.stdout.strip():
        return row | {"broken": done.stderr[-2000:]}
    report = json.loads(done.stdout)
    errors = [each for each in report["findings"] if each["level"] == "error"]
    row |= {
        "errors": [{name: each[name] for name in ("kind", "seen", "where")} for each in errors],
        "hints": [each["kind"] for each in report["findings"] if each["level"] != "error"],
        "not_checked": report["not_checked"],
        "seconds": report["seconds"],
        "status": done.returncode,
    }
    if done.stderr.strip():
        row["stderr"] = done.stderr[-1000:]
    if version.kind == "mistake":
        named = [each for each in errors if each["kind"] in version.kinds]
        row |= {"says": version.says, "named": bool(named), "lines": lines}
        row |= {"line_is_right": any(each["where"] in lines for each in named)}
        row |= {"line_is_accepted": any(each["where"] in accepted for each in named)}
    return row


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--save"]
    rows = []
    for version in versions(*words):
        row = checked(version)
        rows.append(row)
        print(json.dumps(row), flush=True)
    mistakes = [row for row in rows if row["kind"] == "mistake"]
    right = [row for row in rows if row["kind"] != "mistake"]
    score = {
        "mistakes": len(mistakes),
        "named": sum(bool(row.get("named")) for row in mistakes),
        "line_is_right": sum(bool(row.get("line_is_right")) for row in mistakes),
        "line_is_accepted": sum(bool(row.get("line_is_accepted")) for row in mistakes),
        "correct_programs": len(right),
        "false_errors": sum(bool(row.get("errors")) for row in right),
    }
    print(json.dumps(score))
    if "--save" in sys.argv:
        first_sight = json.loads(SCORE.read_text())["first_sight"]
        for row in rows:
            row.pop("stderr", None)  # it has paths of this machine
        SCORE.write_text(json.dumps({"first_sight": first_sight, "now": score, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
