"""What is checked: a program, and the goals that the rules belong to."""

from dataclasses import dataclass
from pathlib import Path

from workshop.check.rules.rule import Rule

KEPT = 0  # the number of the goal without a TODO: what the step before had reached still holds


@dataclass(frozen=True)
class Goal:
    """A goal of an exercise: its number (``KEPT`` has no TODO), its title, and the rules that keep it from being met."""

    number: int
    title: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Subject:
    """A program and what is asked of it.

    Attributes:
        file: the program, or job script.
        name: the name of the exercise that it is, or "".
        goals: of the exercise, in the order in which they are shown; empty for a program that is none.
        rules: all rules to ask.
        unchecked: what the check cannot say of this program, whatever it sees.
    """

    file: Path
    name: str
    goals: tuple[Goal, ...]
    rules: tuple[Rule, ...]
    unchecked: tuple[str, ...] = ()

    def goal_of(self, rule: Rule) -> int:
        """The number of the goal that a rule belongs to."""
        return next((goal.number for goal in self.goals if rule in goal.rules), KEPT)
