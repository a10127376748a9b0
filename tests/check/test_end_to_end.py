"""Each launcher and each stage once, for real. (The solutions: test_exercises.py. The whole bank: with ``--full``.)"""

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
    "another program": "second-same-windows",
}


@pytest.mark.parametrize("name", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_named(name, tmp_path):
    case = case_of(name)
    if case.base.endswith(".sh") and runs.NO_CLUSTER:
        pytest.skip(runs.NO_CLUSTER)
    if "05_deepspeed" in case.base:
        require(*DEEPSPEED)
    verdict, _ = check_for_real(case, tmp_path)
    assert_right(case, verdict)


def test_the_program_that_is_no_exercise_is_right(tmp_path):
    verdict, _ = check_for_real(case_of("solution-language-model"), tmp_path)
    assert verdict.findings == []
    assert verdict.complete
