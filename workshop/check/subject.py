"""The subject of a check: a program, and the goals to which the rules belong."""

from dataclasses import dataclass
from pathlib import Path

from workshop.check.rules.rule import Rule

KEPT = 0  # the number of the goal without a TODO: everything that worked before still works


@dataclass(frozen=True)
class Goal:
    """A goal of an exercise."""

    number: int
    title: str
    rules: tuple[Rule, ...]  # each of which must find nothing


@dataclass(frozen=True)
class Subject:
    """A program and its goals."""

    file: Path  # the program, or job script
    name: str  # of the exercise; "" if it is not an exercise
    goals: tuple[Goal, ...]  # of the exercise, in the order in which they are shown
    rules: tuple[Rule, ...]  # all rules to ask
    unchecked: tuple[str, ...] = ()  # what the check can never judge for this program

    def advises(self, rule: Rule) -> bool:
        """Whether its findings are hints here: no goal depends on them, unless one lists the rule."""
        if self.goals:
            return rule.hint and not any(rule in goal.rules for goal in self.goals)
        return rule.hint or rule.mild

    def goal_of(self, rule: Rule) -> int:
        """The number of the goal that a rule belongs to."""
        return next((goal.number for goal in self.goals if rule in goal.rules), KEPT)
