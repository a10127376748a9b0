"""The rules about pipelines that are built by hand: mistakes that they must name, and correct styles that must pass."""

from check.bank.cases import bank_tests
from check.bank.pipeline import MISTAKES, STYLES

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
