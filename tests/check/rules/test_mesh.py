"""The rules about programs that combine several kinds of parallelism: mistakes that they must name, and correct styles."""

from check.bank import mesh
from check.bank.cases import bank_tests

test_replay, test_for_real = bank_tests(__file__, mesh.MISTAKES, mesh.STYLES)
