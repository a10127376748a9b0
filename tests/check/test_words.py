"""What the check says beside the kinds of its findings: by replay."""

import pytest

from check.bank.replay import replayed
from check.bank.whole import case_of, families


def verdict_of(name):
    """The verdict on the recorded evidence of a case."""
    case = case_of(name)
    (family,) = (family for family, cases in families().items() if case in (*cases[0], *cases[1]))
    return replayed(case, family)


@pytest.mark.parametrize("name", ["dropout", "emptied-tensor", "solution-language-model"])
def test_neither_an_error_nor_a_hint(name):
    assert verdict_of(name).findings == []


@pytest.mark.parametrize("name", ["group-never-destroyed", "first-batch-thrown-away", "same-dropout-on-all-ranks"])
def test_a_hint_keeps_no_goal_from_being_met(name):
    verdict = verdict_of(name)
    assert [finding.is_error for finding in verdict.findings] == [False]
    assert "open" not in verdict.states().values()


def test_a_figure_that_is_missing_is_named():
    assert "no accuracy is given to log.write()" in verdict_of("nothing-reported").errors[0].seen


def test_figures_that_cannot_be_compared_are_not_passed_over():
    verdict = verdict_of("images-as-rows")
    assert len(verdict.unchecked) == 1
    assert verdict.unchecked[0].startswith("the reported figures (AttributeError: ")


@pytest.mark.parametrize(
    ("name", "goal"),
    [("no-restarts", 3), ("runner-without-torchrun", 0), ("runner-of-one-process", 1), ("runner-without-exec", None)],
)
def test_what_the_runner_shows_belongs_to_a_goal(name, goal):
    assert verdict_of(name).first_open == goal


def test_a_lost_connection_is_said_in_plain_words():
    said = [finding.seen for finding in verdict_of("sharded-only-rank-0-writes").findings]
    assert "rank 0 lost its connection to rank 1, which had already ended (RuntimeError)" in said
