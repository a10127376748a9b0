"""Write a report as text, Markdown and JSON, and in the formats of CI services and graders."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from workshop.check import __version__
from workshop.check.junit import clean
from workshop.check.rules.words import plural
from workshop.check.subject import KEPT
from workshop.grades.results import STATES, ExerciseResult, GoalResult, Report

SIGNS = {"met": "✓", "open": "✗"}  # of the states; of all others: "·"
SHOWN = 2  # findings of a goal in a text
LABELS = ("seen", "why", "fix", "read", "where")


def number(points: float) -> str:
    """Return points without needless zeros."""
    return f"{points:g}"


def of(result: Report | ExerciseResult | GoalResult) -> str:
    """Return "3 of 7 points"."""
    return f"{number(result.points)} of {number(result.possible)} point{'' if result.possible == 1 else 's'}"


def safe(text: str) -> str:
    """Return a text of a program on one line and without control characters, which could change a terminal or a report."""
    return " ".join(clean(text).split())


def label(goal: GoalResult) -> str:
    """Return the number and the title of a goal; goal 0 has no number in the exercise."""
    return safe(goal.title) if goal.number == KEPT else f"{goal.number} {safe(goal.title)}"


def outcome(goal: GoalResult) -> str:
    """Return the state in words and the findings of a goal, in several lines."""
    lines = [STATES[goal.state]]
    for finding in goal.findings[:SHOWN]:
        lines += [f"{name}: {safe(finding[name])}" for name in LABELS if finding.get(name)]
    return "\n".join(lines)


# ---------------------------------------------------------------- for people


def exercise_text(exercise: ExerciseResult) -> str:
    """Return one exercise for a terminal."""
    words, lines = f"{exercise.name}: {of(exercise)}", []
    states = {goal.state for goal in exercise.goals}
    if len(states) == 1 and "met" not in states and not any(goal.findings for goal in exercise.goals):
        words += f" ({STATES[states.pop()]})"
    else:
        for goal in exercise.goals:
            state, *findings = outcome(goal).splitlines()
            said = "" if goal.state in SIGNS else f", {state}"
            lines.append(f"  {SIGNS.get(goal.state, '·')} {label(goal)}: {of(goal)}{said}")
            lines += [f"      {line}" for line in findings if goal.state != "met"]
    lines += [f"  not checked: {safe(text)}" for text in exercise.not_checked]
    return "\n".join([words, *lines])


def as_text(report: Report) -> str:
    """Return the last lines for a terminal."""
    lines = [f"\n{of(report)} in {report.seconds:.0f} s"]
    if report.left_out:
        lines.append(f"not counted, because there are no files of them: {plural(len(report.left_out), 'exercise')}")
    if report.status == 2:
        lines.append("some goals could not be judged: see the lines above")
    return "\n".join(lines)


def as_markdown(report: Report) -> str:
    """Return a table for a page of a CI service."""
    lines = [f"## {of(report)}", "", "| exercise | goal | points | result |", "|---|---|--:|---|"]
    for exercise in report.exercises:
        for goal in exercise.goals:
            points = f"{number(goal.points)} / {number(goal.possible)}"
            said = "; ".join(_markdown(safe(finding["seen"])) for finding in goal.findings[:SHOWN])
            words = f"{SIGNS.get(goal.state, '·')} {STATES[goal.state]}" + (f": {said}" if said else "")
            lines.append(f"| {exercise.name} | {_markdown(label(goal))} | {points} | {words} |")
    notes = [f"- {each.name}: {_markdown(safe(text))}" for each in report.exercises for text in each.not_checked]
    if report.left_out:
        notes.append(f"- {plural(len(report.left_out), 'exercise')} without any file")
    if notes:
        lines += ["", "Not checked:", "", *notes]
    return "\n".join([*lines, ""])


def _markdown(text: str) -> str:
    """Escape what Markdown and HTML would interpret."""
    for character in "\\`*_{}[]<>#|~!$&":
        text = text.replace(character, f"&#{ord(character)};" if character in "<>|&" else f"\\{character}")
    return text


# ---------------------------------------------------------------- for programs


def as_json(report: Report) -> str:
    """Return the report as JSON; docs/grades.md describes each field."""
    return json.dumps(report.as_dict(), indent=2) + "\n"


def as_junit(report: Report) -> str:
    """Return a test suite for each exercise and a test for each goal, as the schema junit-10.xsd of Jenkins has them."""
    root = Element("testsuites", name="workshop report")
    for exercise in report.exercises:
        suite = SubElement(root, "testsuite", name=exercise.name, time=f"{exercise.seconds:.2f}")
        for goal in exercise.goals:
            name = f"goal {goal.number}: {goal.title}"
            case = SubElement(suite, "testcase", classname=exercise.name, name=clean(name))
            if goal.state != "met":
                tag = {"untouched": "skipped", "missing": "skipped", "unjudged": "error"}.get(goal.state, "failure")
                SubElement(case, tag, type=goal.state, message=STATES[goal.state]).text = clean(outcome(goal))
            SubElement(case, "system-out").text = of(goal)
        if exercise.not_checked:
            SubElement(suite, "system-out").text = "\n".join(
                f"not checked: {safe(text)}" for text in exercise.not_checked
            )
        _count(suite)
    _count(root)
    root.set("time", f"{report.seconds:.2f}")
    root.attrib.pop("skipped")  # the schema has it only in the suites
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _count(element: Element) -> None:
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(name, str(sum(1 for _ in element.iter(tag))))


def as_gradescope(report: Report) -> str:
    """Return the results.json of a Gradescope autograder: a test for each goal, and no leaderboard."""
    tests = []
    for place, exercise in enumerate(report.exercises, 1):
        for goal in exercise.goals:
            test: dict[str, Any] = {"name": f"{exercise.name}: {label(goal)}", "number": f"{place}.{goal.number}"}
            test |= {"score": goal.points, "max_score": goal.possible}
            test |= {"status": "passed" if goal.state == "met" else "failed", "visibility": "visible"}
            tests.append(test | {"output": outcome(goal), "output_format": "text"})
    lines = [f"{of(report)}; the check is that of the course, version {__version__}"]
    lines += [f"{each.name}, not checked: {safe(text)}" for each in report.exercises for text in each.not_checked]
    content: dict[str, Any] = {"score": report.points, "output": "\n".join(lines), "output_format": "text"}
    content |= {"visibility": "visible", "stdout_visibility": "hidden", "execution_time": round(report.seconds)}
    return json.dumps(content | {"tests": tests}, indent=2) + "\n"


def as_otter(report: Report) -> str:
    """Return what ``GradingResults.from_ottr_json`` of otter-grader reads: a test file for each exercise.

    otter-grader itself stores its results with pickle (dill), and reading such a file can run any code.
    """
    files = []
    for exercise in report.exercises:
        cases = []
        for goal in exercise.goals:
            case = {"name": label(goal), "code": "", "points": goal.possible, "hidden": False}
            case |= {"success_message": None, "failure_message": None}
            passed = goal.state == "met"
            cases.append({"passed": passed, "error": None if passed else outcome(goal), "test_case": case})
        name = Path(exercise.name).as_posix().replace("/", "-")  # otter takes the last part of the path as the name
        # A list gives each goal its points, even if all of them are zero.
        points = [goal.possible for goal in exercise.goals]
        files.append({"filename": name, "points": points, "test_case_results": cases})
    return json.dumps({"test_file_results": files}, indent=2) + "\n"


FORMATS: Mapping[str, Callable[[Report], str]] = {
    "junit": as_junit,
    "json": as_json,
    "gradescope": as_gradescope,
    "otter": as_otter,
    "markdown": as_markdown,
}
