"""The result of a report: the state and the points of each goal."""

from dataclasses import dataclass, field
from typing import Any

from workshop.check.subject import KEPT

VERSION = 1  # of the fields of ``Report.as_dict``; it increases if a field is removed or changes its meaning
# For each state of a goal, the words of the report. The first five are those of the check.
STATES = {
    "met": "met",
    "open": "not met",
    "blocked": "not checked, because of an earlier problem",
    "waiting": "not checked",
    "unjudged": "could not be judged here",
    "delivered": "met by the program as delivered, so it counts only if another goal is met",
    "untouched": "not begun: the files are as delivered",
    "missing": "there is no file of this exercise",
}


@dataclass(frozen=True)
class GoalResult:
    """A goal of an exercise: its state is a key of ``STATES``; findings are those of the check, as dictionaries."""

    number: int
    title: str
    state: str
    possible: float
    findings: tuple[dict[str, str], ...] = ()

    @property
    def points(self) -> float:
        """The points that it earns."""
        return self.possible if self.state == "met" else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the goal for JSON."""
        said: dict[str, Any] = {"number": self.number, "title": self.title, "state": self.state}
        return said | {"points": self.points, "possible": self.possible, "findings": list(self.findings)}


@dataclass(frozen=True)
class ExerciseResult:
    """An exercise.

    Attributes:
        name: its path in the course.
        state: "judged", "untouched", "missing", or "unjudged": the check could not be run to its end for a reason that need not
            be a mistake in the program.
        goals: its goals, in the order of the course.
        not_checked: what was not checked, and why.
        seconds: how long its check took.
    """

    name: str
    state: str
    goals: tuple[GoalResult, ...]
    not_checked: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def points(self) -> float:
        """The points that it earns."""
        return sum(goal.points for goal in self.goals)

    @property
    def possible(self) -> float:
        """The points that it could earn."""
        return sum(goal.possible for goal in self.goals)

    @property
    def judged(self) -> bool:
        """Whether nothing that gives points was left unjudged for a reason that is not in the program."""
        return self.state != "unjudged" and not any(goal.state == "unjudged" and goal.possible for goal in self.goals)

    def as_dict(self) -> dict[str, Any]:
        """Return the exercise for JSON."""
        said: dict[str, Any] = {"exercise": self.name, "state": self.state}
        said |= {"points": self.points, "possible": self.possible, "goals": [goal.as_dict() for goal in self.goals]}
        return said | {"not_checked": list(self.not_checked), "seconds": round(self.seconds, 2)}


@dataclass(frozen=True)
class Report:
    """All exercises of a learner; ``left_out`` are the exercises of the course that the report does not count."""

    exercises: tuple[ExerciseResult, ...]
    left_out: tuple[str, ...] = ()
    seconds: float = field(default=0.0)

    @property
    def points(self) -> float:
        """The points of the learner."""
        return sum(exercise.points for exercise in self.exercises)

    @property
    def possible(self) -> float:
        """The points of a learner who meets all goals."""
        return sum(exercise.possible for exercise in self.exercises)

    @property
    def status(self) -> int:
        """The exit status: 0: all points; 1: not all; 2: something that gives points could not be judged."""
        if not all(exercise.judged for exercise in self.exercises):
            return 2
        return 0 if all(goal.points == goal.possible for each in self.exercises for goal in each.goals) else 1

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON; docs/grades.md describes each field."""
        said: dict[str, Any] = {"version": VERSION, "status": self.status}
        said |= {"points": self.points, "possible": self.possible}
        said |= {"exercises": [exercise.as_dict() for exercise in self.exercises], "left_out": list(self.left_out)}
        return said | {"seconds": round(self.seconds, 2)}


def settled(states: dict[int, str]) -> dict[int, str]:
    """Return the states of goals in which goal 0 counts only with another goal: the program as delivered meets goal 0."""
    others = {state for number, state in states.items() if number != KEPT}
    if others and "met" not in others and states.get(KEPT) == "met":
        return states | {KEPT: "delivered"}
    return states
