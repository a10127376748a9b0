"""What is checked: a program, and the goals that the rules belong to."""

from dataclasses import dataclass
from pathlib import Path

from workshop.check.rules.rule import Rule

KEPT = 0  # the number of the goal without a TODO: what the step before had reached still holds


@dataclass(frozen=True)
class Goal:
    """A goal of an exercise."""

    number: int
    title: str
    rules: tuple[Rule, ...]  # that keep it from being met


@dataclass(frozen=True)
class Subject:
    """A program and what is asked of it."""

    file: Path  # the program, or job script
    name: str  # of the exercise that it is, or ""
    goals: tuple[Goal, ...]  # of the exercise, in the order in which they are shown
    rules: tuple[Rule, ...]  # all rules to ask
    unchecked: tuple[str, ...] = ()  # what the check cannot say of this program, whatever it sees

    def goal_of(self, rule: Rule) -> int:
        """The number of the goal that a rule belongs to."""
        return next((goal.number for goal in self.goals if rule in goal.rules), KEPT)
