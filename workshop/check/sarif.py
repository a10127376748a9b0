"""Show a verdict as SARIF 2.1.0, with what GitHub's code scanning requires."""

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workshop.check import __version__
from workshop.check.places import Place, place_of
from workshop.check.rules.rule import Rule
from workshop.check.verdict import Finding, Verdict

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(verdict: Verdict, folder: Path) -> str:
    """Return the verdict on a program that starts in a folder."""
    driver = {"name": "workshop-check", "semanticVersion": __version__}
    notes = [{"level": "note", "message": {"text": f"not checked: {text}"}} for text in verdict.unchecked]
    run = {
        "tool": {"driver": driver | {"rules": [_rule(rule) for rule in verdict.subject.rules]}},
        "invocations": [{"executionSuccessful": verdict.judged, "toolExecutionNotifications": notes}],
        "columnKind": "unicodeCodePoints",
        "results": list(_results(verdict, folder)),
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    said = inspect.getdoc(rule.detectors[0].function) or rule.why
    read = f"\nSee {rule.read}" if rule.read else ""
    described: dict[str, Any] = {
        "id": rule.name,
        "shortDescription": {"text": said.splitlines()[0]},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.fix + read},
        "defaultConfiguration": {"level": "note" if rule.hint else "error"},
        "properties": {"tags": [rule.family]},
    }
    return described | ({"helpUri": rule.read} if "://" in rule.read else {})


def _results(verdict: Verdict, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the findings. GitHub merges results with the same rule, file and hash, so the hash counts equal lines."""
    root = next((place for place in (folder, *folder.parents) if (place / ".git").exists()), folder).resolve()
    rules = [rule.name for rule in verdict.subject.rules]
    equal: Counter[tuple[str, str, str]] = Counter()
    for finding in verdict.findings:
        place = place_of(finding, verdict.subject.file, folder)
        inside = place.file.is_relative_to(root)
        uri = quote(place.file.relative_to(root).as_posix()) if inside else place.file.as_uri()
        text = place.text.strip()
        equal[finding.kind, uri, text] += 1
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        yield {
            "ruleId": finding.kind,
            "ruleIndex": rules.index(finding.kind),
            "level": _level(finding),
            "message": {"text": f"{finding.seen.rstrip('.')}. {finding.rule.why} {finding.fix}"},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": _region(place)}}],
            "partialFingerprints": {"primaryLocationLineHash": f"{digest}:{equal[finding.kind, uri, text]}"},
        }


def _level(finding: Finding) -> str:
    """A warning is a hint that is an error in an exercise."""
    return "error" if finding.is_error else "note" if finding.rule.hint else "warning"


def _region(place: Place) -> dict[str, int]:
    line, begin = max(1, place.line), len(place.text) - len(place.text.lstrip()) + 1
    return {"startLine": line, "startColumn": begin, "endLine": line, "endColumn": max(begin, len(place.text) + 1)}
