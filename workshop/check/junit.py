"""Show a verdict as JUnit XML, which CI services display as tests."""

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from workshop.check.rules.rule import Rule
from workshop.check.verdict import Finding, Verdict

# What XML cannot contain: terminal escapes in the output of a program, for example.
FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(verdict: Verdict) -> str:
    """Return the verdict: a test for each rule that was to judge the program, and for each thing that was not checked."""
    suite = Element("testsuite", name="workshop-check")
    if not verdict.judged:
        _fails(_case(suite, "check", "judged"), "error", "the program could not be judged", "")
    rules = {detector.rule for detector in verdict.planned | verdict.asked | verdict.missed}
    for rule in (rule for rule in verdict.subject.rules if rule in rules):
        _judged(_case(suite, rule.family, rule.name), rule, verdict)
    for text in verdict.unchecked:
        SubElement(_case(suite, "not checked", text), "skipped", message=clean(text))
    for name, outcome in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(1 for _ in suite.iter(outcome))))
    suite.set("time", f"{verdict.seconds:.2f}")
    root = Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _judged(case: Element, rule: Rule, verdict: Verdict) -> None:
    """Say in the test of a rule what it found."""
    found = [finding for finding in verdict.findings if finding.rule is rule]
    errors = [finding for finding in found if finding.is_error]
    if errors:
        _fails(case, "failure", "; ".join(finding.seen for finding in errors), "\n\n".join(map(_text, errors)))
    elif any(finding.rule is rule for finding in verdict.hidden):
        SubElement(case, "skipped", message="what it found is ignored or known")
    elif rule not in verdict.judged_rules:
        SubElement(case, "skipped", message="not judged in this run")
    if hints := [_text(finding) for finding in found if not finding.is_error]:
        SubElement(case, "system-out").text = "\n\n".join(hints)


def _case(suite: Element, family: str, name: str) -> Element:
    return SubElement(suite, "testcase", classname=f"workshop-check.{family}", name=clean(name))


def _fails(case: Element, outcome: str, message: str, text: str) -> None:
    SubElement(case, outcome, type=case.get("name", ""), message=clean(message)).text = text


def _text(finding: Finding) -> str:
    lines = [finding.seen, f"why: {finding.rule.why}", f"fix: {finding.fix}"]
    lines += [f"read: {finding.rule.read}", f"where: {finding.where}", finding.detail]
    return clean("\n".join(line for line in lines if not re.fullmatch(r"(\w+: )?", line)))


def clean(text: str) -> str:
    """Return a text without the characters that XML cannot contain, such as terminal escapes."""
    return FORBIDDEN.sub("", text)
