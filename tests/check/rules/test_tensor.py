"""The rules about tensor parallelism that is built by hand: mistakes that they must name, and correct styles that must pass."""

from check.bank import tensor
from check.bank.cases import bank_tests

MISTAKES, STYLES = tensor.MISTAKES, tensor.STYLES

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
