"""Check one mistake for each launcher and stage with real runs (solutions: test_exercises.py; whole bank: ``--full``)."""

import pytest

import runs
from check.bank.cases import assert_right
from check.bank.replay import check_for_real
from check.bank.whole import case_of
from needs import DEEPSPEED, require

CASES = {
    "one process": "fast-asks-for-each-loss",
    "mp.spawn": "not-wrapped",
    "the real mp.spawn": "no-main-guard",
    "torchrun": "optimizer-not-loaded",
    "Lightning": "lightning-nobody-deals",
    "FSDP": "sharded-root-only",
    "DeepSpeed": "zero-stage-0",
    "Accelerate": "accelerate-gathers-all",
    "a job": "job-rank-of-the-batch-script",
    "a program that is not an exercise": "second-same-windows",
}


@pytest.mark.parametrize("name", CASES.values(), ids=CASES.keys())
def test_the_check_names_the_mistake(name, tmp_path):
    case = case_of(name)
    if case.base.endswith(".sh") and runs.NO_CLUSTER:
        pytest.skip(runs.NO_CLUSTER)
    if "05_deepspeed" in case.base:
        require(*DEEPSPEED)
    verdict, _ = check_for_real(case, tmp_path)
    assert_right(case, verdict)


def test_a_correct_program_that_is_not_an_exercise_gets_no_finding(tmp_path):
    verdict, _ = check_for_real(case_of("solution-language-model"), tmp_path)
    assert verdict.findings == []
    assert verdict.complete
