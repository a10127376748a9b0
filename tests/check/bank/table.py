"""Print the bank as JSON: PYTHONPATH=tests python -m check.bank.table prints which kind the check names for each mistake.

With a report of the real runs (pytest --junit-xml), it prints the kinds and lines that these runs named, and their
seconds. Only real runs find the line at which ranks part, because recorded evidence has no traces of lines.
"""

import difflib
import json
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from check.bank.case import Case
from check.bank.cases import first_kind
from check.bank.replay import replayed
from check.bank.whole import case_of, families
from workshop.check.origins import at_origin
from workshop.check.verdict import Verdict
from workshop.repository import ROOT


def by_replay() -> list[dict]:
    """Return a row for each mistake, from its recorded evidence."""
    return [_row(case, replayed(case, family)) for family, (mistakes, _) in families().items() for case in mistakes]


def _row(case: Case, verdict: Verdict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, Path(case.base).name)
        script.write_text(case.source())
        found = [at_origin(finding, script, script.parent) for finding in verdict.errors or verdict.findings]
    return {
        "mistake": case.name,
        "expected": " or ".join(case.kinds),
        "named": first_kind(verdict),
        "line": found[0].where if found else "",
        "edited": edited_lines(case),
    }


def edited_lines(case: Case) -> str:
    """Return the lines that the mistake has changed, as in "12, 40-43"; for a deletion, the line before it."""
    before, after = (ROOT / case.base).read_text().splitlines(), case.source().splitlines()
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    ranges = [(start + 1, end) for kind, _, _, start, end in changes if kind != "equal"]
    return ", ".join(f"{first}-{last}" if last > first else str(min(first, max(last, 1))) for first, last in ranges)


def line_is_edited(row: dict) -> bool:
    """Return whether the finding points at a line that the mistake has changed."""
    line = row.get("line", "").rpartition(":")[2]
    ranges = [each.partition("-") for each in row.get("edited", "").split(", ") if each]
    return any(line.isdigit() and int(first) <= int(line) <= int(last or first) for first, _, last in ranges)


def for_real(report: str) -> list[dict]:
    """Return a row for each mistake in a report of real runs."""
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        found = {each.get("name"): each.get("value") for each in case.iter("property")}
        if "expected" in found:
            mistake = case.get("name", "").split("[")[1].rstrip("]")
            seconds = float(found["seconds"] or 0)
            row = {name: found[name] for name in ("expected", "named", "line")}
            rows.append({"mistake": mistake, **row, "edited": edited_lines(case_of(mistake)), "seconds": seconds})
    return rows


def main(arguments: list[str]) -> None:
    """Print the table."""
    rows = for_real(arguments[0]) if arguments else by_replay()
    right = sum(row["named"] in row["expected"].split(" or ") for row in rows)
    head = json.dumps({"mistakes": len(rows), "named_right": right, "line_is_edited": sum(map(line_is_edited, rows))})
    print(head[:-1] + ', "rows": [\n ' + ",\n ".join(map(json.dumps, rows)) + "\n]}")


if __name__ == "__main__":
    main(sys.argv[1:])
