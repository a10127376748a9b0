"""Correct programs of the referee, whose styles no other program of the bank has."""

from check.bank.case import style
from check.bank.cases import bank_tests

FOLDER = "tests/check/referee"

MISTAKES = ()
STYLES = (
    style(
        "public-zero-by-hand",
        f"{FOLDER}/zero1_by_hand/train.py",
        "Each rank has the state of a part of the parameters.",
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
