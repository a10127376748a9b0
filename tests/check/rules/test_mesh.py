"""The rules about programs that combine several kinds of parallelism: mistakes that they must name, and correct styles."""

from check.bank.cases import bank_tests
from check.bank.mesh import MISTAKES, STYLES

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
