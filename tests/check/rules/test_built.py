"""The rules about programs that build a parallelism: mistakes that they must name, and correct styles that must pass.

The cases are in ``check/bank/built_*.py``, one file for each exercise.
"""

from check.bank import built_ddp, built_fsdp, built_zero1
from check.bank.cases import bank_tests

MISTAKES = (*built_ddp.MISTAKES, *built_zero1.MISTAKES, *built_fsdp.MISTAKES)
STYLES = (*built_ddp.STYLES, *built_zero1.STYLES, *built_fsdp.STYLES)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
