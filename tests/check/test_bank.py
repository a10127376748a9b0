"""The bank as a whole: the cases that each rule must have, and the recorded evidence."""

import ast
import dataclasses
import lzma
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from check.bank.replay import EVIDENCE, evidence, replayed
from check.bank.whole import all_mistakes, all_styles, families
from workshop.check.evidence.recorded import all_events
from workshop.check.rules import FAMILIES
from workshop.check.rules.rule import RULES
from workshop.course.exercises import programs
from workshop.repository import ROOT

NOT_RULES = {
    "solutions",
    "public",
    "still",
}  # files of the bank that do not belong to one family; "still": exercise 5 of slurm


def test_case_names_are_unique_and_the_bank_does_not_shrink():
    mistakes, styles = all_mistakes(), all_styles()
    names = Counter(case.name for case in (*mistakes, *styles))
    assert [name for name, count in names.items() if count > 1] == []
    assert len(mistakes) >= 229
    assert len(styles) >= 87
    assert sum(case.held_out for case in mistakes) == 29


@pytest.mark.parametrize("family", families())
def test_the_edits_fit_and_the_kinds_exist(family):
    for case in (*families()[family][0], *families()[family][1]):
        text = case.source()
        if case.base.endswith(".py"):
            compile(text, case.name, "exec")
        assert set(case.kinds) <= set(RULES), case.name


def test_a_mistake_is_in_the_file_of_its_first_kind():
    assert set(families()) - NOT_RULES == set(FAMILIES)
    for family in set(families()) - NOT_RULES:
        for case in families()[family][0]:
            assert family == ("jobs" if case.base.endswith(".sh") else RULES[case.kinds[0]].family), case.name


def test_each_rule_has_a_mistake():
    named = {case.kinds[0] for case in all_mistakes()}
    assert sorted(set(RULES) - named) == ["ended-early"]  # of no exercise: test_unexplained.py


def test_each_rule_lets_a_style_pass():
    silent: set[str] = set()
    for family, (_, styles) in families().items():
        for case in styles:
            verdict = replayed(case, family)
            silent |= {detector.rule.name for detector in verdict.asked} - {each.kind for each in verdict.findings}
    assert sorted(set(RULES) - silent) == []


def test_each_rule_belongs_to_a_goal_or_is_asked_of_any_program():
    used = {rule.name for program in programs() for goal in program.goals for rule in program.rules(goal)}
    unused = [name for name, rule in RULES.items() if not (name in used or rule.always or rule.hint or rule.anywhere)]
    assert unused == []


# ---------------------------------------------------------------- events: what is recorded is read

CHECK, COURSE = ROOT / "workshop" / "check", ROOT / "workshop" / "course"


@cache
def _nodes(*folders: Path) -> list[ast.AST]:
    """Return the syntax nodes of the Python files in these folders."""
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    return [node for file in files for node in ast.walk(ast.parse(file.read_text()))]


@pytest.mark.parametrize("name", all_events())
def test_each_event_is_written_and_read(name):
    writers, readers = (
        _nodes(CHECK, CHECK / "probes", COURSE, COURSE / "built"),
        _nodes(CHECK / "rules", CHECK / "evidence", CHECK, COURSE, COURSE / "built"),
    )
    made = {node.func.id for node in writers if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert name in made, "no probe writes it"
    assert name in {node.id for node in readers if isinstance(node, ast.Name)} | {"Forward"}, "no rule reads it"
    read = {node.attr for node in readers if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    read |= {
        node.value for node in readers if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }  # names for getattr()
    assert [part.name for part in dataclasses.fields(all_events()[name]) if part.name not in read] == []


# ---------------------------------------------------------------- the recorded evidence


def test_the_evidence_is_small():
    sizes = {file.name: file.stat().st_size for file in EVIDENCE.glob("*.xz")}
    assert {name: size for name, size in sizes.items() if size > 1_000_000} == {}
    assert sum(sizes.values()) < 12_000_000


def test_the_evidence_has_exactly_the_cases_of_the_bank():
    for family, (mistakes, styles) in families().items():
        assert set(evidence(family)) == {case.name for case in (*mistakes, *styles)}


def test_the_evidence_names_no_machine():
    for file in EVIDENCE.glob("*.xz"):
        content = lzma.decompress(file.read_bytes())
        assert str(ROOT).encode() not in content, file.name
        assert b"/pytest-of-" not in content, file.name
