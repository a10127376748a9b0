"""Correct programs of the referee, whose styles no program of the bank has: L-BFGS, ZeRO by hand, Accelerate's repeated batch."""

from check.bank.case import style
from check.bank.cases import bank_tests

FOLDER = "tests/check/referee"

MISTAKES = ()
STYLES = (
    style("public-lbfgs", f"{FOLDER}/pinn_lbfgs/train.py", "L-BFGS calls its closure several times in a step."),
    style(
        "public-zero-by-hand",
        f"{FOLDER}/zero1_by_hand/train.py",
        "Each rank has the state of a part of the parameters.",
    ),
    style("public-repeated-batch", f"{FOLDER}/accelerate_onecycle/train.py", "Accelerate repeats a batch at the end."),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
