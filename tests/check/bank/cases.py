"""The tests of a family of rules: all its cases by replay daily, and with real runs with --full."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import runs
from check.bank.case import Case
from check.bank.replay import check_for_real, replayed
from workshop.check.judge import BUG
from workshop.check.verdict import Verdict


def bank_tests(file: str, mistakes: Sequence[Case], styles: Sequence[Case]):
    """Return two tests that cover each case: one by replay, one with real runs.

    Args:
        file: the file of the tests, ``test_FAMILY.py``.
        mistakes: versions with a mistake.
        styles: correct versions.
    """
    cases = [pytest.param(case, id=case.name) for case in (*mistakes, *styles)]

    @pytest.mark.parametrize("case", cases)
    def test_replay(case, pytestconfig):
        if pytestconfig.getoption("--record", False):
            pytest.skip("its evidence is being recorded")
        assert_right(case, replayed(case, family_of(file)))

    @pytest.mark.full
    @pytest.mark.parametrize("case", cases)
    def test_for_real(case, tmp_path, recording, record_property):
        if case.base.endswith(".sh") and runs.NO_CLUSTER:
            pytest.skip(runs.NO_CLUSTER)
        start = time.monotonic()
        verdict, record = check_for_real(case, tmp_path)
        recording[case.name] = record
        if case.kinds:  # for the table of the bank (table.py)
            record_property("seconds", round(time.monotonic() - start, 1))
            record_property("expected", " or ".join(case.kinds))
            record_property("named", first_kind(verdict))
            found = verdict.errors or verdict.findings
            record_property("line", found[0].where if found else "")
        assert_right(case, verdict)

    return test_replay, test_for_real


def family_of(file: str) -> str:
    """Return the name of the family that a file tests."""
    return Path(file).stem.removeprefix("test_")


def first_kind(verdict: Verdict) -> str:
    """Return the kind of the first error, or of the first hint if there is no error."""
    found = verdict.errors or verdict.findings
    return found[0].kind if found else "nothing"


def assert_right(case: Case, verdict: Verdict) -> None:
    """Fail unless the check says about a case what it must say."""
    said = "\n".join(f"{finding.kind}: {finding.seen}" for finding in verdict.findings) or "nothing was found"
    assert [text for text in verdict.unchecked if BUG in text] == []
    if case.kinds:
        assert first_kind(verdict) in case.kinds, said
    else:
        assert verdict.errors == [], said
