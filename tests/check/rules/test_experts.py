"""The rules about expert parallelism that is built by hand: mistakes that they must name, and correct styles that must pass."""

from check.bank import experts
from check.bank.cases import bank_tests

MISTAKES, STYLES = experts.MISTAKES, experts.STYLES

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
