"""The solution of each exercise passes all parts of the check, including those with a real launcher."""

from check.bank import second
from check.bank.case import style
from check.bank.cases import bank_tests
from workshop.course.exercises import programs
from workshop.repository import ROOT


def _solution(exercise):
    path = exercise.solution if exercise.solution.exists() else exercise.path  # a program that is given
    return style(f"solution-{exercise.path.stem}", str(path.relative_to(ROOT)), "The solution.", real=True)


MISTAKES = ()
STYLES = (*map(_solution, programs()), style("solution-language-model", second.PROGRAM, "It has no mistake."))

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
