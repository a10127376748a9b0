"""The rules about ring attention that is built by hand: mistakes that they must name, and correct styles that must pass."""

from check.bank.cases import bank_tests
from check.bank.ring import MISTAKES, STYLES

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
